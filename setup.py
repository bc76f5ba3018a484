import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithMim(build_py):
    """Puts configs, tools and model index where MIM looks for them: ``kcla_mm/.mim``."""

    def run(self):
        super().run()
        if getattr(self, 'editable_mode', False):
            return
        mim = Path(self.build_lib, 'kcla_mm', '.mim')
        shutil.rmtree(mim, ignore_errors=True)
        for folder in ('configs', 'tools'):
            shutil.copytree(ROOT / folder, mim / folder, ignore=shutil.ignore_patterns('__pycache__'))
        shutil.copy(ROOT / 'model-index.yml', mim)


version = {}
exec((ROOT / 'kcla_mm' / 'version.py').read_text(), version)

# The frameworks are not required by name: two families of releases provide the same modules, and pip
# would install one over the other.
setup(
    name='kcla-mm',
    version=version['__version__'],
    description='ResNet backbones with key-correlated layer attention for MMDetection, MMSegmentation and MMPretrain',
    license='Apache-2.0',
    python_requires='>=3.8',
    packages=find_packages(include=['kcla_mm', 'kcla_mm.*']),
    package_data={'kcla_mm.segmentation': ['kvasir_seg/*.txt']},
    cmdclass={'build_py': BuildWithMim},
    zip_safe=False,
)
