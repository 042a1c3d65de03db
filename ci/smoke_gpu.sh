#!/usr/bin/env bash
# Everything that needs a GPU, on any CUDA host: the tests, as they are and under the settings that
# the incidents ran with, then the table of compile races. PYTHON names the Python that has torch.
# All of it is run, whatever fails: GPU time is scarce.
set -uo pipefail
cd "$(dirname "$0")/.."

export PYTHON="${PYTHON:-python3}" PYTHONPATH="$PWD"
status=0
make gpu || status=1
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:512 CUDA_MODULE_LOADING=LAZY make gpu || status=1
"$PYTHON" -m diagnostics fxrace --device cuda || test $? -eq 1 || status=1 # 1: something was found
exit "$status"
