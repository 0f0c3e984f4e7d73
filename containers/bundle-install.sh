#!/usr/bin/env bash
# Makes a virtual environment from the bundle in this folder, without a network. What it reads from the environment:
#   VENV    folder of the virtual environment (default .venv)
#   PYTHON  interpreter (default: the first of the bundle's version in the PATH, with torch if the bundle has none)
#   MPI     bundle: use the MPI of the bundle where the machine has one that fits, too
set -euo pipefail
bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VENV=${VENV:-.venv} MPI=${MPI:-}
export PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 LC_ALL=C
unset PIP_REQUIRE_VIRTUALENV PIP_USER PIP_TARGET PIP_CONSTRAINT PYTHONHOME PYTHONPATH

say() { echo "install: $*"; }
stop() { printf 'install: %s\n' "$@" >&2; exit 1; }

# shellcheck disable=SC1091  # python_version, machine, glibc, mpi_library, torch
. "$bundle/settings"
# shellcheck disable=SC2154
[ "$(uname -m)" = "$machine" ] || stop "this bundle is for $machine, and this machine is $(uname -m)"
found=$(getconf GNU_LIBC_VERSION 2>/dev/null) || found=""
# shellcheck disable=SC2154
[ "$(printf '%s\n' "$glibc" "${found#glibc }" | sort -V | head -n 1)" = "$glibc" ] ||
    stop "this bundle needs glibc $glibc, and this machine has ${found:-none}: make the bundle on an older system"

# The folder that has torch; empty without torch.
torch_of() {
    "$1" -c 'import importlib.util as u, pathlib as p; print(p.Path(u.find_spec("torch").origin).parents[1])' 2>/dev/null
}
# shellcheck disable=SC2154
suits() {
    "$1" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$python_version')" 2>/dev/null &&
        { [ "$torch" = bundle ] || [ -n "$(torch_of "$1")" ]; }
}
python=""
for candidate in ${PYTHON:-python3 "python$python_version" python}; do
    if suits "$candidate"; then python=$candidate && break; fi
done
[ -n "$python" ] || stop "no Python $python_version$([ "$torch" = bundle ] || echo ' with torch') by the name of \
${PYTHON:-python3 or python$python_version}: name one by PYTHON=/path/to/python"
if [ -n "$(ls -A "$VENV" 2>/dev/null)" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
    stop "$VENV holds something, and no virtual environment, so nothing in it is replaced: name another by VENV="
fi

say "making $VENV"
"$python" -m venv --clear --without-pip "$VENV"
VENV=$(cd "$VENV" && pwd)
packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
[ "$torch" = bundle ] || torch_of "$python" >"$packages/hpctrain-torch.pth"
PYTHONPATH=$(echo "$bundle"/wheels/pip-*.whl) "$VENV/bin/python" -m pip install -q --no-deps --ignore-installed \
    "$bundle"/wheels/*.whl

mkdir "$VENV/runtime"
cp -r "$bundle/runtime/hdf5" "$VENV/runtime"
launcher=mpirun
# shellcheck disable=SC2154
if [ ! -d "$bundle/runtime/mpi" ] || { [ "$MPI" != bundle ] &&
    "$VENV/bin/python" -c "import ctypes; ctypes.CDLL('$mpi_library')" 2>/dev/null; }; then
    say "MPI: $mpi_library of this machine"
else
    say "MPI: that of the bundle"
    mpi=$VENV/runtime/mpi launcher=$VENV/bin/mpirun
    cp -r "$bundle/runtime/mpi" "$VENV/runtime"
    variables="OPAL_PREFIX=$mpi OPAL_BINDIR=$mpi/bin OPAL_LIBDIR=$mpi/lib OPAL_PKGLIBDIR=$mpi/lib/openmpi"
    variables+=" OPAL_DATADIR=$mpi/share OPAL_PKGDATADIR=$mpi/share OPAL_SYSCONFDIR=$mpi/etc"
    variables+=" PMIX_MCA_pcompress_base_silence_warning=1"  # PMIx has no plug-ins here
    # Open MPI looks for its plug-ins and texts there, also without mpirun.
    echo "import os; os.environ.update(each.split('=', 1) for each in '''$variables'''.split())" \
        >"$packages/hpctrain-mpi.pth"
    printf '#!/bin/sh\nexport %s\nexec "%s" "$@"\n' "$variables" "$mpi/bin/orterun" >"$launcher"
    chmod +x "$launcher"
fi
cat >"$VENV/hpctrain.env" <<END
# Written by install.sh of a bundle: the launcher of the MPI that this environment uses.
: "\${MPIRUN:=$launcher}"
export MPIRUN
END
say "checking"
"$VENV/bin/python" -c 'import h5py, torch; from mpi4py import MPI
assert h5py.get_config().mpi, "h5py was built without MPI"'
say "done: $VENV"
say "next: source $VENV/bin/activate, then hpctrain doctor"
