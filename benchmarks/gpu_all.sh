#!/usr/bin/env bash
# The bi-softmax on a machine with a CUDA card, in under 525 seconds, what matters most first: tests of
# the Triton kernels, times against their peers and the aims, the kernels' variants (no limit, causal,
# masked, widths 72 and 96) and a sweep of tiles, a whole layer.
#   benchmarks/gpu_all.sh            # into runs/gpu, or where $OUT says
# It leaves there: table.md (a row a step, then what each benchmark printed) and a .log of each step.
# It leaves out what runs on the CPU only: adaptive_tap.py, vs_torchdeq.py, step.py.
# Needs what is installed already: torch with CUDA, triton, pytest, numpy, scipy, tyro; pytest-xdist
# is used where it is there; no network. PYTHON names another interpreter. Exits with 1 if anything
# failed or ran out of time.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LIMIT=510 # seconds until the last step is stopped; a stopped one has 5 more to end
PYTHON="${PYTHON:-python3}"
OUT="${OUT:-runs/gpu}"
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
SUMMARY="$OUT/table.md"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
failed=0

has() { "$PYTHON" -c "import $1" >/dev/null 2>&1; }

"$PYTHON" - <<'PY' || { echo "gpu_all: $PYTHON has no torch with a CUDA device" >&2; exit 1; }
import sys, torch
sys.exit(not torch.cuda.is_available())
PY
for module in triton pytest numpy scipy tyro; do
    has "$module" || { echo "gpu_all: $PYTHON has no $module" >&2; exit 1; }
done

"$PYTHON" - >"$SUMMARY" <<'PY'
import platform, torch, triton
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
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
step tests 170 "$PYTHON" -m pytest -q -W default ${workers[@]+"${workers[@]}"} \
    tests/kernels/test_triton.py
step bisoftmax 160 "$PYTHON" benchmarks/bisoftmax.py peers
step variants 120 "$PYTHON" benchmarks/bisoftmax.py variants --sweep
step layer 60 "$PYTHON" benchmarks/bisoftmax.py layer --rounds 5

{
    for name in bisoftmax variants layer; do
        if [ -s "$OUT/$name.log" ]; then
            printf '\n## %s\n\n' "$name"
            cat "$OUT/$name.log"
        fi
    done
} >>"$SUMMARY"
sed -n '1,12p' "$SUMMARY"
echo "everything: $SUMMARY ($SECONDS s)"
exit "$failed"
