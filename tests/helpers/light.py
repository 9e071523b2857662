"""An environment with this one's packages, but those that only a real GPU needs."""

import sys
import sysconfig
import venv
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
REAL_GPU = {"nvidia", "triton", "cuda"}


def light_environment(folder, *, cudnn=False):
    """Make the environment in a folder, of links alone; return its Python.

    The dynamic linker looks for NVIDIA's libraries beside torch's own, by the folder that these are
    opened in: so torch's folder of libraries, and cuDNN's, are folders of their own.
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
