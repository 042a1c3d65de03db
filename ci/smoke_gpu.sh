#!/usr/bin/env bash
# Everything that needs a GPU, on any CUDA host: the tests, as they are and under the settings that
# the incidents ran with, then the table of compile races. PYTHON names the Python that has torch.
set -euo pipefail
cd "$(dirname "$0")/.."

export PYTHON="${PYTHON:-python3}" PYTHONPATH="$PWD"
make gpu
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:512 CUDA_MODULE_LOADING=LAZY make gpu
"$PYTHON" -m diagnostics fxrace --device cuda || test $? -eq 1 # 1: something was found
