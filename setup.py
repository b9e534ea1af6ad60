"""Builds the accelerator, torch_dpsco/_kernel.c, where there is a compiler; everything else is in setup.cfg.

The library is loaded with ctypes (`torch_dpsco.native`) and needs no header of Python, so that one wheel serves all
versions of it. Without a compiler setuptools warns, and installation goes on; a wheel is then one for any machine.
"""

import os
import re
import sys
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path("torch_dpsco/_kernel.c")
# IEEE arithmetic whatever CFLAGS say: proofs rely on it. Fused products are allowed for there.
FLAGS = ["-O3", "-std=gnu11", "-fno-fast-math", "-fno-math-errno", "-ffp-contract=fast"]
FLAGS += ["-fvisibility=hidden", "-Wno-psabi"]
VERSION = f"{zlib.crc32(SOURCE.read_text(encoding='utf-8').encode())}LL"


class Library(build_ext):
    """Builds a library that is no module of Python."""

    def get_ext_filename(self, fullname):
        """Returns its path: by its name no module of Python, which tools that walk a package would import."""
        return str(Path(*fullname.split("."))) + ".bin"

    def get_export_symbols(self, ext):
        """Returns what Windows must be told besides what the source declares: nothing."""
        return []


commands = {"build_ext": Library}
try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    pass
else:

    class Wheel(bdist_wheel):
        """Names the platform, where there is a library for it, and no version of Python."""

        def get_tag(self):
            """Returns the parts of the file's name."""
            built = Path(self.bdist_dir)
            if built.is_dir() and not list(built.rglob("_kernel.bin")):
                self.root_is_pure = True
                return "py3", "none", "any"
            return "py3", "none", super().get_tag()[2]

    commands["bdist_wheel"] = Wheel


def description(home):
    """Returns the README as a registry shows it: it knows no file of the repository but by the address `home`."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->\n", "", text)
    picture, link = (
        r"!\[([^]]*)\]\((?!https?:)([^)]*)\)",
        r"(?<!!)\[([^]]*)\]\((?!https?:|#)([^)]*)\)",
    )
    if not home:
        return re.sub(link, r"\1", re.sub(picture, "", text))
    text = re.sub(picture, rf"![\1]({home}/raw/main/\2)", text)
    return re.sub(link, rf"[\1]({home}/blob/main/\2)", text)


HOME = os.environ.get("HOME_PAGE", "").rstrip("/")

setup(
    long_description=description(HOME),
    long_description_content_type="text/markdown",
    project_urls={"Repository": HOME, "Changelog": f"{HOME}/blob/main/CHANGELOG.md"}
    if HOME
    else {},
    cmdclass=commands,
    ext_modules=[
        Extension(
            "torch_dpsco._kernel",
            [str(SOURCE)],
            define_macros=[("DPSCO_VERSION", VERSION)],
            extra_compile_args=FLAGS,
            libraries=[] if sys.platform == "win32" else ["m"],
            optional=True,
        )
    ],
)
