#!/bin/sh
# Makes the environment of `pytest -m upstream`: tests/upstream/make_environment.sh FOLDER [VLLM:VLLM_ASCEND ...]
# FOLDER/venv: a Python with upstream's requirements. FOLDER/VLLM: that release of vllm with one of vllm-ascend, both
# unmodified; by default the two releases that the suite is about. What is there already stays.
# vllm is built from its source distribution for no device at all, which leaves out its CUDA libraries (0.5 GB a release).
set -eu
if [ $# -eq 0 ]; then
    echo "usage: $0 FOLDER [VLLM:VLLM_ASCEND ...], e.g. $0 FOLDER 0.24.0:0.24.0rc1" >&2
    exit 2
fi
folder=$1
shift
[ $# -gt 0 ] || set -- 0.22.1:0.22.1rc1 0.23.0:0.23.0
for pair; do
    case $pair in ?*:?*) ;; *) echo "$pair: not a pair VLLM:VLLM_ASCEND of releases" >&2 && exit 2 ;; esac
done
here=$(dirname "$0")
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
[ -x "$folder/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder/venv"
install() {
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$here/constraints.txt" "$@"
}
echo "upstream's requirements"
install -e "$here/../..[upstream]"
# Without their own requirements, which would bring CUDA and Ascend packages.
install --no-deps xgrammar torchvision
for pair; do
    vllm=${pair%%:*} vllm_ascend=${pair#*:}
    if [ -d "$folder/$vllm" ]; then
        echo "vllm $vllm is there"
        continue
    fi
    echo "vllm $vllm, vllm-ascend $vllm_ascend"
    rm -rf "$folder/unfinished"
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$vllm \
        install --no-deps --no-binary vllm --no-build-isolation --target "$folder/unfinished" "vllm==$vllm"
    # Where there is no wheel, its source distribution without kernels; the kind of device does not matter then.
    COMPILE_CUSTOM_KERNELS=0 SOC_VERSION=ascend910_9391 \
        install --no-deps --no-build-isolation --target "$folder/unfinished" "vllm-ascend==$vllm_ascend"
    # What it asks for in another version than the requirements above have; each round may ask for more.
    while :; do
        missing=$(cd "$here/../.." && "$folder/venv/bin/python" -m tests.upstream.requirements "$folder/unfinished")
        [ -n "$missing" ] || break
        echo "$missing" | sed 's/^/  with /'
        # shellcheck disable=SC2086 # a word a requirement
        "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target \
            "$folder/unfinished" $missing
    done
    mv "$folder/unfinished" "$folder/$vllm"
done
echo "$folder/venv/bin/python -m pytest -m upstream"
