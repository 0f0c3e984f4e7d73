#!/usr/bin/env bash
# Makes a virtual environment with hpctrain, mpi4py and parallel h5py built against one MPI and one HDF5.
# Asks nothing. Used by the Makefile and by container builds. What it reads from the environment:
#   MPI          openmpi, mpich or empty (the mpicc of the loaded module or the PATH, else Open MPI)
#   VENV         folder of the virtual environment (default .venv)
#   PYTHON       interpreter or its version, 3.10 or newer (default: the first suitable in the PATH)
#   HDF5_DIR     prefix of a parallel HDF5 (default: looked for)
#   GPU          build of torch: cuda, rocm, xpu or no (default: cuda if nvidia-smi finds a GPU, otherwise no)
#   TORCH_INDEX  extra package index for torch (default: the one for GPU; empty: only those that pip is configured with)
#   EXTRAS       extras of pyproject.toml to install (default test,lint)
#   FETCH        no: never install packages of the operating system
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MPI=${MPI:-} VENV=${VENV:-.venv} EXTRAS=${EXTRAS-test,lint} FETCH=${FETCH:-yes} GPU=${GPU:-}
INDEXES=https://download.pytorch.org/whl ROCM=rocm7.2
constraints=containers/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 DEBIAN_FRONTEND=noninteractive LC_ALL=C
unset PIP_REQUIRE_VIRTUALENV PYTHONHOME PYTHONPATH

say() { echo "install: $*"; }
stop() { printf 'install: %s\n' "$@" >&2; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }

case $MPI in "" | openmpi | mpich) ;; *) stop "MPI=$MPI: must be openmpi, mpich or empty" ;; esac
case $GPU in "" | cuda | rocm | xpu | no) ;; *) stop "GPU=$GPU: must be cuda, rocm, xpu, no or empty" ;; esac

# --- packages of the operating system ---------------------------------------------------------------

as_root=()
can_fetch() {
    [ "$FETCH" != no ] && has apt-get || return 1
    [ "$(id -u)" = 0 ] && return 0
    has sudo && sudo -n true 2>/dev/null && as_root=(sudo -n --preserve-env=DEBIAN_FRONTEND)
}

# What `mpirun` and its kin mean must not change because a second MPI is installed beside the first.
fetch() {
    local before name
    before=$(for name in mpi mpirun; do update-alternatives --query $name 2>/dev/null |
        sed -n "s/^Value: /$name /p"; done || true)
    say "installing $*"
    local quiet=(-o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 -qq)
    "${as_root[@]}" apt-get "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null 2>&1 || {
        "${as_root[@]}" apt-get "${quiet[@]}" update
        "${as_root[@]}" apt-get "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null
    } || stop "apt-get could not install: $*" "install them by hand, then run this again"
    while read -r name path; do
        [ -z "$name" ] || "${as_root[@]}" update-alternatives --set "$name" "$path" >/dev/null 2>&1 || true
    done <<<"$before"
}

# --- Python -------------------------------------------------------------------------------------------

suits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        if [[ $PYTHON =~ ^3\.[0-9]+$ ]]; then PYTHON=python$PYTHON; fi
        has "$PYTHON" || stop "PYTHON=$PYTHON: there is no such program in the PATH"
        "$PYTHON" --version >/dev/null 2>&1 || stop "PYTHON=$PYTHON: the program does not start"
        suits "$PYTHON" || stop "PYTHON=$PYTHON: must be Python 3.10 or newer"
        return
    fi
    for name in python3 python3.11 python3.12 python3.13 python3.10; do
        if has $name && suits $name; then PYTHON=$(command -v $name) && return; fi
    done
    return 1
}

if ! find_python; then
    can_fetch || stop "no Python 3.10 or newer in the PATH" \
        "load a module (module avail python), install one, or name one: make install PYTHON=/path/to/python3"
    fetch python3 python3-dev python3-venv
    find_python || stop "this system's python3 is older than 3.10; name a newer one with PYTHON="
fi
PYTHON=$("$PYTHON" -c 'import sys; print(sys.executable)')  # not a shim, whose meaning may change
python_version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# --- MPI ----------------------------------------------------------------------------------------------

# Kind and version of the MPI behind a compiler wrapper, e.g. "openmpi 4.1.4".
describe_mpi() {
    local macros
    macros=$(echo '#include <mpi.h>' | "$1" -E -dM -x c - 2>/dev/null) || return 1
    value() { sed -n "s/^#define $1 *\"\{0,1\}\([^\"]*\)\"\{0,1\} *$/\1/p" <<<"$macros"; }
    if [ -n "$(value OMPI_MAJOR_VERSION)" ]; then
        echo "openmpi $(value OMPI_MAJOR_VERSION).$(value OMPI_MINOR_VERSION).$(value OMPI_RELEASE_VERSION)"
    elif [ -n "$(value I_MPI_VERSION)" ]; then
        echo "intelmpi $(value I_MPI_VERSION)"
    elif [ -n "$(value MVAPICH2_VERSION)$(value MVAPICH_VERSION)" ]; then
        echo "mvapich $(value MVAPICH2_VERSION)$(value MVAPICH_VERSION)"
    elif [ -n "$(value MPICH_VERSION)" ]; then
        echo "mpich $(value MPICH_VERSION)"
    else
        echo "mpi $(value MPI_VERSION).$(value MPI_SUBVERSION)"
    fi
}

# Debian keeps both MPIs side by side, as mpicc.openmpi and mpicc.mpich; a module puts its mpicc first in the PATH.
find_mpi() {
    local plain candidate
    local candidates=()
    plain=$(command -v mpicc || true)
    if [ -n "$plain" ] && [ "$plain" != /usr/bin/mpicc ]; then candidates+=("$plain"); fi
    if [ -n "$MPI" ]; then candidates+=("mpicc.$MPI"); else candidates+=(mpicc.openmpi); fi
    if [ -n "$plain" ]; then candidates+=("$plain"); fi
    if [ -z "$MPI" ]; then candidates+=(mpicc.mpich); fi
    for candidate in "${candidates[@]}"; do
        has "$candidate" && mpi_name=$(describe_mpi "$candidate") || continue
        if [ -z "$MPI" ] || [ "${mpi_name%% *}" = "$MPI" ] || [ "$MPI ${mpi_name%% *}" = "mpich mvapich" ]; then
            mpicc=$(command -v "$candidate")
            mpi_kind=${mpi_name%% *}
            return 0
        fi
    done
    return 1
}

# The mpirun that belongs to mpicc.
find_launcher() {
    local folder suffix name
    folder=$(dirname "$mpicc") suffix=$(basename "$mpicc") suffix=${suffix#mpicc}
    for name in "$folder/mpirun$suffix" "$folder/mpiexec$suffix" mpirun mpiexec srun; do
        if has "$name"; then command -v "$name" && return; fi
    done
    echo mpirun
}

# --- HDF5 ---------------------------------------------------------------------------------------------

# Whether hdf5.h in $1 and libhdf5 in $2 are parallel and use the very MPI of mpicc; sets hdf5_version or hdf5_why.
try_hdf5() {
    local include=$1 library=$2 macros work libraries
    [ -f "$include/hdf5.h" ] && compgen -G "$library/libhdf5.*" >/dev/null || return 1
    macros=$(echo '#include <hdf5.h>' | "$mpicc" -E -dM -x c -I"$include" - 2>/dev/null) || return 1
    if ! grep -q '^#define H5_HAVE_PARALLEL 1' <<<"$macros"; then
        hdf5_why="the HDF5 in $include is not parallel"
        return 1
    fi
    work=$(mktemp -d)
    cat >"$work/try.c" <<'C'
#include <hdf5.h>
int main(void) { return H5Pset_fapl_mpio(H5P_DEFAULT, MPI_COMM_WORLD, MPI_INFO_NULL) < 0; }
C
    if ! "$mpicc" -w -I"$include" "$work/try.c" -o "$work/try" -L"$library" -Wl,-rpath,"$library" -lhdf5 \
        2>"$work/errors"; then
        hdf5_why="the HDF5 in $library does not link with $mpicc: $(head -n 1 "$work/errors")"
        rm -r "$work"
        return 1
    fi
    libraries=$(ldd "$work/try" 2>/dev/null | sed -n 's/^[[:space:]]*\(libmpi[a-z]*\)\.so.*/\1/p' |
        grep -E '^(libmpi|libmpich|libmpi_cray)$' | sort -u) || true
    rm -r "$work"
    if [ "$(wc -w <<<"$libraries")" -gt 1 ]; then
        hdf5_why="the HDF5 in $library is built with another MPI than $mpicc (it would load ${libraries//$'\n'/ and })"
        return 1
    fi
    hdf5_version=$(sed -n 's/^#define H5_VERS_INFO *"HDF5 library version: \(.*\)" *$/\1/p' <<<"$macros")
    hdf5_include=$include hdf5_library=$library
}

try_prefix() {
    local folder
    for folder in "$1/lib" "$1/lib64" "$1"/lib/*-linux-gnu; do
        if try_hdf5 "$1/include" "$folder"; then return 0; fi
    done
    return 1
}

try_flags() {
    local flag includes=() libraries=(/usr/lib64 /usr/lib)
    for flag in $1; do
        case $flag in -I*) includes+=("${flag#-I}") ;; -L*) libraries=("${flag#-L}" "${libraries[@]}") ;; esac
    done
    local include library
    for include in "${includes[@]}" /usr/include; do
        for library in "${libraries[@]}"; do
            if try_hdf5 "$include" "$library"; then return 0; fi
        done
    done
    return 1
}

find_hdf5() {
    local name folder prefix
    hdf5_why="there is none that hpctrain could find"
    if [ -n "${HDF5_DIR:-}" ]; then
        hdf5_why="HDF5_DIR=$HDF5_DIR: no hdf5.h and libhdf5 there"
        try_prefix "$HDF5_DIR"
        return
    fi
    for name in h5pcc "h5pcc.$mpi_kind"; do
        has "$name" || continue
        prefix=$("$name" -showconfig 2>/dev/null | sed -n 's/^[[:space:]]*Installation point:[[:space:]]*//p')
        [ "$prefix" = /usr ] || [ -z "$prefix" ] && continue
        if try_prefix "$prefix"; then return 0; fi
    done
    for name in "hdf5-$mpi_kind" hdf5-mpi hdf5; do
        has pkg-config && pkg-config --exists "$name" 2>/dev/null || continue
        if try_flags "$(PKG_CONFIG_ALLOW_SYSTEM_CFLAGS=1 PKG_CONFIG_ALLOW_SYSTEM_LIBS=1 \
            pkg-config --cflags --libs "$name")"; then return 0; fi
    done
    for folder in /usr/lib/*-linux-gnu/hdf5/"$mpi_kind"; do
        if try_hdf5 "/usr/include/hdf5/$mpi_kind" "$folder"; then return 0; fi
    done
    return 1
}

# --- what is missing ----------------------------------------------------------------------------------

missing() {
    find_mpi || echo mpi
    has cc || has gcc || echo compiler
    [ -f "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || echo python
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || [ -x "$VENV/bin/pip" ] || echo venv
}

lacks=$(missing)
if ! find_mpi || ! find_hdf5; then lacks+=" hdf5"; fi
if [ -n "$lacks" ]; then
    wanted=${MPI:-${mpi_kind:-openmpi}}
    packages=()
    case $lacks in *mpi*) if [ "$wanted" = mpich ]; then packages+=(mpich libmpich-dev); else
        packages+=(openmpi-bin libopenmpi-dev); fi ;; esac
    case $lacks in *hdf5*) packages+=("libhdf5-$wanted-dev") ;; esac
    case $lacks in *compiler*) packages+=(gcc g++) ;; esac
    case $lacks in *python*) packages+=("python$python_version-dev") ;; esac
    case $lacks in *venv*) packages+=("python$python_version-venv") ;; esac
    # A module's MPI takes its HDF5 from a module too: Debian's would be built with another one.
    if [[ -n "${mpicc:-}" && "$mpicc" != /usr/bin/* && $lacks == *hdf5* ]] || ! can_fetch; then
        hints=("missing or unfit:")
        case $lacks in *mpi*) hints+=("  MPI${MPI:+ ($MPI)}: no mpicc in the PATH that works") ;; esac
        case $lacks in *hdf5*) hints+=("  parallel HDF5: ${hdf5_why:-not looked for without an MPI}") ;; esac
        case $lacks in *compiler*) hints+=("  a C compiler") ;; esac
        case $lacks in *python*) hints+=("  Python.h, the development files of $PYTHON") ;; esac
        case $lacks in *venv*) hints+=("  ensurepip and venv of $PYTHON") ;; esac
        hints+=("on a cluster: load modules of one MPI and of a parallel HDF5 built with it, for example"
            "    module load gcc openmpi hdf5        (names differ: module avail hdf5, module spider hdf5)"
            "  where there is no such module, name a prefix: make install HDF5_DIR=/path/to/hdf5"
            "on Debian or Ubuntu: sudo apt-get install ${packages[*]}"
            "then run the same command again")
        stop "${hints[@]}"
    fi
    fetch "${packages[@]}"
    hash -r
    lacks=$(missing)
    if ! find_mpi; then stop "installed ${packages[*]}, but still no mpicc works"; fi
    if ! find_hdf5; then stop "installed ${packages[*]}, but still: $hdf5_why"; fi
    [ -z "$lacks" ] || stop "installed ${packages[*]}, but still missing: $lacks"
fi
launcher=$(find_launcher)

# --- nothing to do? -----------------------------------------------------------------------------------

asked=$GPU
if [ -z "$GPU" ] && has nvidia-smi && nvidia-smi -L 2>/dev/null | grep -q GPU; then GPU=cuda; fi
GPU=${GPU:-no}
state=$(cat pyproject.toml "$constraints" containers/install.sh | cksum)
state="$state | $EXTRAS | ${TORCH_INDEX-} | gpu $GPU | $(realpath "$PYTHON") $python_version | $mpicc $mpi_name | $hdf5_library $hdf5_version"
stamp=$VENV/hpctrain.stamp
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ] && "$VENV/bin/python" -c "" 2>/dev/null; then
    say "$VENV is up to date ($mpi_name, HDF5 $hdf5_version, Python $python_version)"
    exit 0
fi
say "$mpi_name ($mpicc), HDF5 $hdf5_version ($hdf5_library), Python $python_version ($PYTHON)"

# --- the virtual environment --------------------------------------------------------------------------

mkdir -p "$(dirname "$VENV")"
rm -f "$stamp"
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1 ||
    [ "$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != "$python_version" ]; then
    if [ -n "$(ls -A "$VENV" 2>/dev/null)" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
        stop "$VENV holds something, and no virtual environment, so nothing in it is replaced: name another by VENV="
    fi
    say "making $VENV"
    "$PYTHON" -m venv --clear "$VENV"
fi
python=$VENV/bin/python
pip() { "$python" -m pip "$@"; }
install() { pip install -qq --progress-bar off -c "$constraints" "$@"; }

install --upgrade pip setuptools wheel

# --- mpi4py and h5py, for the MPI and HDF5 at hand ------------------------------------------------------

# Their wheels are kept for the next environment of the same MPI, HDF5 and Python. pip's own cache is left out
# of it: it does not know one MPI from another.
pinned() { sed -n "s/^$1==\([^;[:space:]]*\).*/\1/p" "$constraints"; }
built_with="${mpi_name// /-}-hdf5-$hdf5_version-py$python_version-$(uname -m)"
built_with+="-$(echo "$mpicc $hdf5_include $hdf5_library $(realpath "$PYTHON")" | cksum | cut -d' ' -f1)"
wheels=${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/hpctrain/wheels/$built_with
mkdir -p "$wheels" 2>/dev/null && [ -w "$wheels" ] || wheels=$PWD/.wheels/$built_with
mkdir -p "$wheels"
work=$(mktemp -d "$wheels/build.XXXXXX")

kept() { compgen -G "$wheels/$1-$(pinned "$1")-*.whl" >/dev/null; }
keep() { mv "$2/$1-$(pinned "$1")-"*.whl "$wheels/"; }

# build NAME [VARIABLE=VALUE ...]: the wheel of NAME, built into $wheels with what $work/tools has.
build() {
    local name=$1 version log=$work/$1.txt
    shift
    version=$(pinned "$name")
    say "building $name $version (a minute or two)"
    env PYTHONPATH="$work/tools" "$@" "$python" -m pip wheel --no-cache-dir --no-deps --no-build-isolation \
        --no-binary="$name" --wheel-dir "$work/$name" "$name==$version" >"$log" 2>&1 || {
        touch "$work/$name.failed"
        stop "$name $version did not build; the last lines of $log:" "$(tail -n 25 "$log")"
    }
    keep "$name" "$work/$name"
}

# The MPI library that a program or module loads where nothing but what is built into it tells where to look.
library_of() {
    local path
    path=$(env -u LD_LIBRARY_PATH -u LD_PRELOAD ldd "$1" |
        sed -n 's/^[[:space:]]*lib\(mpi\|mpich\|mpi_cray\)\.so[^ ]* => \(\/[^ ]*\) .*/\2/p' | head -n 1)
    [ -n "$path" ] && realpath "$path"
}

# mpi4py's published wheel holds a module for each binary interface of MPI, and takes whichever library it finds
# first. Here only the module of the MPI at hand is left in, and only if it loads the very library of mpicc.
take_mpi4py() {
    local folder=$work/published tree module abi=mpich
    if [ "$mpi_kind" = openmpi ]; then abi=openmpi; fi
    pip download -qq --no-deps --only-binary=mpi4py -d "$folder" "mpi4py==$(pinned mpi4py)" &&
        "$python" -m wheel unpack -d "$folder" "$folder"/mpi4py-*.whl || return 1
    tree=$folder/mpi4py-$(pinned mpi4py)
    module=$(compgen -G "$tree/mpi4py/MPI.$abi.*") || return 1
    mv "$module" "$folder/module"
    rm "$folder"/*.whl "$tree"/mpi4py/MPI.*.so
    module=$tree/mpi4py/MPI.${module##*/MPI."$abi".}
    mv "$folder/module" "$module"
    echo '#include <mpi.h>
        int main(void) { return MPI_Finalize(); }' >"$folder/try.c"
    "$mpicc" -w "$folder/try.c" -o "$folder/try" && [ "$(library_of "$folder/try")" = "$(library_of "$module")" ] &&
        PYTHONPATH=$tree "$python" -c 'import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
MPI.Get_library_version()' && "$python" -m wheel pack -d "$folder" "$tree" && keep mpi4py "$folder"
}

get_mpi4py() {
    kept mpi4py || take_mpi4py >"$work/published.txt" 2>&1 || build mpi4py MPICC="$mpicc" CC="$mpicc"
}

get_h5py() {
    local rpath="" cores
    kept h5py && return
    case $hdf5_library in /usr/lib*) ;; *) rpath="-Wl,-rpath,$hdf5_library ${LDFLAGS-}" ;; esac
    cores=$(nproc 2>/dev/null || echo 2)
    printf '[build_ext]\nparallel = %s\n' $((cores < 8 ? cores : 8)) >"$work/parallel.cfg"
    # HDF5 does the work: optimizing what calls it takes half of the time and gives nothing.
    build h5py HDF5_MPI=ON CC="$mpicc" H5PY_SETUP_REQUIRES=0 HDF5_DIR= DIST_EXTRA_CONFIG="$work/parallel.cfg" \
        CFLAGS="${CFLAGS--O1 -g0}" \
        HDF5_INCLUDEDIR="$hdf5_include" HDF5_LIBDIR="$hdf5_library" LDFLAGS="${rpath:-${LDFLAGS-}}"
}

# fit NAME: install its wheel. Doing that anew under processes that use it would hurt them, so only where it is
# another one.
fit() {
    local version
    version=$(pinned "$1")
    if [ "$(cat "$VENV/hpctrain.$1" 2>/dev/null)" != "$built_with $version" ]; then
        pip install -qq --force-reinstall --no-deps "$wheels/$1-$version-"*.whl
        echo "$built_with $version" >"$VENV/hpctrain.$1"
    fi
}

# start WHAT: a function in the background, in a process group of its own, which ends with this script.
builders=()
start() {
    set -m
    "$1" 2>"$work/$1.errors" &
    builders+=("$!:$1")
    set +m
}

# finish: wait for all that was started; what one of them failed with is the last that is said.
finish() {
    local builder
    for builder in "${builders[@]}"; do
        wait "${builder%%:*}" || { cat "$work/${builder#*:}.errors" >&2; exit 1; }
    done
    builders=()
}

# What failed to build leaves its log behind.
end() {
    local code=$? builder
    for builder in "${builders[@]}"; do kill -- "-${builder%%:*}" 2>/dev/null || true; done
    if [ $code = 0 ] || ! compgen -G "$work/*.failed" >/dev/null; then rm -rf "$work"; fi
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# They are made while pip installs the rest. h5py needs of mpi4py only its declarations, which any wheel has.
if ! kept mpi4py || ! kept h5py; then
    say "tools for building"
    install --target "$work/tools" numpy Cython pkgconfig
    install --target "$work/tools" --no-deps --only-binary=mpi4py mpi4py 2>/dev/null || {
        get_mpi4py
        pip install -qq --target "$work/tools" --no-deps "$wheels/mpi4py-$(pinned mpi4py)-"*.whl
    }
    start get_mpi4py
    start get_h5py
fi

# --- torch and the rest -------------------------------------------------------------------------------

say "torch"
torch_index=()
if [ -n "${TORCH_INDEX-}" ]; then
    torch_index=(--extra-index-url "$TORCH_INDEX")
elif [ -z "${TORCH_INDEX+set}" ]; then
    # The default index has only the CUDA build, gigabytes that a machine without a GPU has no use for.
    chosen=
    if [ $GPU = no ]; then
        chosen=$(pip install --dry-run --no-deps --ignore-installed -c "$constraints" torch 2>/dev/null | tail -n 1) || true
    fi
    case $GPU-$(uname -s)-$(uname -m)-$chosen in
        rocm-*) torch_index=(--extra-index-url "$INDEXES/$ROCM") ;;
        xpu-*) torch_index=(--extra-index-url "$INDEXES/xpu") ;;
        no-*+cpu*) ;;
        no-Linux-x86_64-*) torch_index=(--extra-index-url "$INDEXES/cpu" --retries 1 --timeout 15) ;;
    esac
fi

# The GPUs that the installed torch is built for: cuda, rocm, xpu or no.
torch_build() {
    "$python" -c 'from torch import version
print("cuda" if version.cuda else "rocm" if version.hip else "xpu" if version.xpu else "no")' 2>/dev/null
}

# pip takes one build of a version for another.
if [ -n "$asked" ] && build=$(torch_build) && [ "$build" != "$asked" ]; then pip uninstall -qq -y torch; fi
install "${torch_index[@]}" torch || install torch
# A torch for GPUs computes on CPUs, too.
if [ -n "${asked#no}" ] && build=$(torch_build) && [ "$build" != "$asked" ]; then
    stop "GPU=$asked: pip installed a torch for GPU=$build; name an index that has one for $asked:" \
        "    make install GPU=$asked TORCH_INDEX=URL    (https://pytorch.org/get-started/locally shows them)"
fi

say "what hpctrain${EXTRAS:+ with $EXTRAS} needs"
requirements=$("$python" - "$EXTRAS" <<'PYTHON'
import re, sys
from setuptools.config.pyprojecttoml import read_configuration
project = read_configuration("pyproject.toml", expand=False)["project"]

def of_extras(names):
    """What extras want, an extra that stands in another (as hpctrain[data]) by what it wants itself."""
    for name in names.split(","):
        for line in project["optional-dependencies"].get(name.strip(), []):
            ours = re.fullmatch(r"hpctrain\[(.*)\]", line)
            yield from of_extras(ours[1]) if ours else [line]

wanted = [*project["dependencies"], *of_extras(sys.argv[1])]
print("\n".join(line for line in wanted if re.match(r"[\w.-]+", line)[0] not in ("h5py", "mpi4py", "torch")))
PYTHON
)
readarray -t requirements <<<"$requirements"
install "${requirements[@]}"

finish
fit mpi4py
fit h5py
install --no-build-isolation -e ".${EXTRAS:+[$EXTRAS]}"

cat >"$VENV/hpctrain.env" <<END
# Written by containers/install.sh: the launcher of the MPI that this environment is built with.
: "\${MPIRUN:=$launcher}"
export MPIRUN
END
echo "$wheels" >"$VENV/hpctrain.wheels"
say "checking"
"$python" -c 'import h5py, mpi4py, torch; assert h5py.get_config().mpi, "h5py was built without MPI"'
echo "$state" >"$stamp"
say "done: $VENV"
