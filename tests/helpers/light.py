"""Make an environment with this one's packages, except those that only a real GPU needs."""

import sys
import sysconfig
import venv
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
REAL_GPU = {"nvidia", "triton", "cuda"}


def light_environment(folder, *, cudnn=False):
    """Make the environment in a folder, from symbolic links; return its Python.

    The dynamic linker looks for NVIDIA's libraries relative to the folder from which it opened
    torch's. So the ``lib`` folders of torch and cuDNN are real folders, with links to the files.
    """
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for path in SITE.iterdir():
        if path.name not in {*REAL_GPU, "torch"}:
            (packages / path.name).symlink_to(path)
    _link(SITE / "torch", packages / "torch", apart="lib")
    if cudnn:
        _link(SITE / "nvidia/cudnn", packages / "nvidia/cudnn", apart="lib")
    return str(folder / "bin" / Path(sys.executable).name)


def _link(source, target, *, apart):
    (target / apart).mkdir(parents=True)
    for path in source.iterdir():
        if path.name != apart:
            (target / path.name).symlink_to(path)
    for path in (source / apart).iterdir():
        (target / apart / path.name).symlink_to(path)
