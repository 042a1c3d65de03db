#!/usr/bin/env bash
# The installed commands, run as a user would, on the tiny target and the CPU. Expects them on PATH
# or in .venv/bin.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
target=tests/fixtures/tiny-qwen3

dflash --help >"$work/help.txt"
dflash-diag --help >"$work/diag-help.txt"
dflash-diag env

printf 'def %s_file(self):\n' open read parse write split find load close send sort copy \
    >"$work/prompts.txt"
dflash prepare "$work/prompts.txt" --target-model "$target" --output-dir "$work/data" \
    --device cpu --max-new-tokens 32 --max-seq-len 128 --no-chat-template
train=(dflash train --target-model "$target" --data-dir "$work/data" --output-dir "$work/run"
    --target-gpus cpu --drafter-gpus cpu,cpu --num-draft-layers 2 --block-size 4 --epochs 2
    --max-seq-len 128 --token-budget 512 --max-batch-size 4 --save-interval 1 --log-interval 1
    --use-soft-labels --cap-lambda 0.1 --noise-start 0.05 --noise-end 0.01)
"${train[@]}" --rehearse
"${train[@]}"
last=$(find "$work/run" -name 'step-*' | sort | tail -n 1)
rm -r "$last"
cp -r "$work/run" "$work/first"
"${train[@]}" --resume auto
dflash compare "$work/first" "$work/run"
test -f "$last/model.safetensors"
echo "CPU smoke run: prepared, rehearsed, trained, saved, resumed and compared"
