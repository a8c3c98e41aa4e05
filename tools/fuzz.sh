#!/bin/sh
# The C targets, SECONDS each: fuzz.sh SECONDS. The kernels' entry in front of a page that nothing follows, and the DOCA
# adapter's ring under the sanitizers: inputs made at random; where clang can link libFuzzer (Debian: libclang-rt-dev), also
# those that it finds by what they reach. PYTHON, and KERNELS (the library to try), may be set.
set -eu
seconds=$1
python=${PYTHON:-.venv/bin/python}
mkdir -p build/fuzz/corpus/kernels build/fuzz/corpus/ring
KERNELS=${KERNELS:-$($python -m dpuflow.kernels._build)}
export KERNELS

cc -O1 -Wall -Wextra -Werror -o build/fuzz/kernels tools/fuzz_kernels.c -ldl
build/fuzz/kernels "$KERNELS" "$seconds"
make -s -C doca_bindings build/fuzz/ring
doca_bindings/build/fuzz/ring "$seconds"

probe='int LLVMFuzzerTestOneInput(const char *data, unsigned long size) { return data && size > 1u << 30; }'
if ! echo "$probe" | clang -fsanitize=fuzzer,address,undefined -x c - -o build/fuzz/probe 2>/dev/null; then
	echo "libFuzzer: not tried: clang with its runtime is not here"
	exit 0
fi
clang -O1 -Wall -Wextra -Werror -fsanitize=fuzzer -DLIBFUZZER -o build/fuzz/kernels-guided tools/fuzz_kernels.c -ldl
make -s -C doca_bindings build/fuzz/ring-guided
# An input that something falls over is left in build/fuzz.
for target in build/fuzz/kernels-guided doca_bindings/build/fuzz/ring-guided; do
	name=$(basename $target -guided)
	[ "$name" != ring ] || cp doca_bindings/simulator/fuzz/corpus/* build/fuzz/corpus/ring/
	$target -max_total_time="$seconds" -max_len=512 -verbosity=0 -print_final_stats=1 -rss_limit_mb=600 \
		-artifact_prefix=build/fuzz/ "build/fuzz/corpus/$name" 2>build/fuzz/told || { cat build/fuzz/told >&2; exit 1; }
	sed -n "s/^stat::number_of_executed_units: */$name, by libFuzzer: inputs /p" build/fuzz/told
done
