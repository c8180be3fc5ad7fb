#!/usr/bin/env bash
# Everything that a CUDA card is needed for, in under 280 seconds: the tests marked gpu, the race against
# torchdeq's solvers, layers against an encoder layer, and the attention kernels against their peers.
#   benchmarks/gpu_all.sh            # writes to runs/gpu, or to $OUT
#   benchmarks/gpu_all.sh --tiny     # the same at small sizes on a CPU, which tests the programs
# It leaves table.md there (one row a step, then what each benchmark printed) and a .log of each step.
# It needs what is installed already: torch with CUDA, triton, pytest, numpy, scipy, tyro, torchdeq; it uses
# pytest-xdist where that is installed, and no network. PYTHON names another interpreter. It exits with 1 if
# a step failed or ran out of time.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LIMIT=270 # seconds until the last step is stopped; a stopped step has 5 more to end
TINY=""
[ "${1:-}" = --tiny ] && TINY=--tiny && LIMIT=3600
PYTHON="${PYTHON:-python3}"
OUT="${OUT:-runs/gpu}"
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
SUMMARY="$OUT/table.md"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
[ -n "$TINY" ] && export TRITON_INTERPRET=1
failed=0

has() { "$PYTHON" -c "import $1" >/dev/null 2>&1; }

[ -n "$TINY" ] || "$PYTHON" - <<'PY' || { echo "gpu_all: $PYTHON has no torch with a CUDA device" >&2; exit 1; }
import sys, torch
sys.exit(not torch.cuda.is_available())
PY
for module in triton pytest numpy scipy tyro torchdeq; do
    has "$module" || { echo "gpu_all: $PYTHON has no $module" >&2; exit 1; }
done

"$PYTHON" - >"$SUMMARY" <<'PY'
import platform, torch, triton
name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no card"
print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, "
      f"Python {platform.python_version()}\n")
print("| step | result | seconds |\n|---|---|---|")
PY

# step NAME SECONDS COMMAND...: runs it with a log of its own and writes a row of the table
step() {
    local name="$1" most="$2" left=$((LIMIT - SECONDS)) begin=$SECONDS result=passed code=0
    shift 2
    if ((left < 15)); then
        echo "| $name | NO TIME LEFT | 0 |" >>"$SUMMARY"
        failed=1
        return
    fi
    echo "== $name"
    timeout --kill-after=5 $((most < left ? most : left)) "$@" >"$OUT/$name.log" 2>&1 || code=$?
    ((code == 124 || code == 137)) && result="OUT OF TIME"
    ((code != 0 && code != 124 && code != 137)) && result="FAILED ($code)"
    ((code == 0)) || failed=1
    tail -n 15 "$OUT/$name.log"
    echo "| $name | $result | $((SECONDS - begin)) |" >>"$SUMMARY"
}

workers=()
if has xdist; then
    cores="$(nproc)"
    workers=(-n "$((cores < 12 ? cores : 12))") # what takes time is compiling
fi
# The device's warnings are not this package's: they are shown, and do not fail a test.
most=60 shapes=()
[ -n "$TINY" ] && most=900 shapes=(--shapes 1 2 16 8 --rounds 1)
step tests "$most" "$PYTHON" -m pytest -q -W default ${workers[@]+"${workers[@]}"} -m gpu \
    tests/deq/test_cuda.py tests/solvers/test_cuda_turns.py tests/kernels/test_triton.py
step race "$most" "$PYTHON" benchmarks/gpu.py race $TINY
step layers "$most" "$PYTHON" benchmarks/gpu.py layers $TINY
step bisoftmax "$most" "$PYTHON" benchmarks/bisoftmax.py peers ${shapes[@]+"${shapes[@]}"}

{
    for name in race layers bisoftmax; do
        if [ -s "$OUT/$name.log" ]; then
            printf '\n## %s\n\n' "$name"
            cat "$OUT/$name.log"
        fi
    done
} >>"$SUMMARY"
sed -n '1,12p' "$SUMMARY"
echo "everything: $SUMMARY ($SECONDS s)"
exit "$failed"
