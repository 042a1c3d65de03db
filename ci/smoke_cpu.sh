#!/usr/bin/env bash
# The installed commands, run as a user would. Expects them on PATH or in .venv/bin.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

dflash --help
dflash-diag --help
dflash-diag env
