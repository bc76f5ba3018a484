"""What importing the package says of the OpenMMLab packages around it."""
import subprocess
import sys
from pathlib import Path

import mmcv
import mmdet
import mmengine
import mmseg
import pytest

from kcla_mm import frameworks

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize('module, version, message', [
    (mmengine, '0.9.1', 'kcla_mm needs mmengine>=0.10.0,<1.0.0, but mmengine 0.9.1 is installed: pip install mmengine'),
    (mmcv, '1.7.2', 'kcla_mm needs mmcv>=2.0.0,<3.0.0, but mmcv 1.7.2 is installed: pip install mmcv=='),
    (mmcv, '3.0.0', 'kcla_mm needs mmcv>=2.0.0,<3.0.0, but mmcv 3.0.0 is installed'),
    (mmdet, '2.28.0', 'kcla_mm needs mmdet>=3.1.0,<4.0.0, but mmdet 2.28.0 is installed: pip install mmdet=='),
    (mmseg, '0.30.0', 'kcla_mm needs mmseg>=1.1.0,<2.0.0, but mmseg 0.30.0 is installed: pip install mmsegmentation=='),
])
def test_a_version_that_does_not_fit(monkeypatch, module, version, message):
    monkeypatch.setattr(module, '__version__', version)
    alone = {name: versions for name, versions in frameworks.FRAMEWORKS.items() if name == module.__name__}
    monkeypatch.setattr(frameworks, 'FRAMEWORKS', alone)
    with pytest.raises(ImportError) as error:
        frameworks.check_needed()
        frameworks.import_installed('kcla_mm.backbones')
    assert message in str(error.value)


def test_a_framework_that_does_not_fit_is_left_out_while_another_does(monkeypatch):
    monkeypatch.setattr(mmseg, '__version__', '0.30.0')
    with pytest.warns(UserWarning, match='kcla_mm leaves mmseg out, which does not import: kcla_mm needs mmseg>=1.1.0'):
        frameworks.import_installed('kcla_mm.backbones')


def run_without(absent, code):
    """Runs code in a Python in which packages are not installed."""
    code = f'import sys\nfor name in {absent!r}:\n    sys.modules[name] = None\n{code}'
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def test_layer_attention_needs_nothing_but_pytorch():
    code, output = run_without(['mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain'], '''
import torch
from kcla_mm.layer_attention import KCLA
print(KCLA(64)(torch.rand(1, 64, 4, 4))[0].shape)
''')
    assert code == 0 and '[1, 64, 4, 4]' in output, output


@pytest.mark.parametrize('absent, message', [
    (['mmcv'], 'kcla_mm needs mmcv>=2.0.0,<3.0.0, which is not installed: pip install mmcv=='),
    (['mmdet', 'mmseg', 'mmpretrain'], 'kcla_mm needs at least one framework, but none is installed: pip install'),
])
def test_a_missing_package(absent, message):
    code, output = run_without(absent, 'import kcla_mm')
    assert code != 0 and message in output.splitlines()[-1], output


@pytest.mark.parametrize('framework, backbones', [
    ('mmdet', ['KCLAResNet']),
    ('mmseg', ['KCLAResNet', 'KCLAResNetUNet']),
])
def test_with_one_framework_alone(framework, backbones):
    pytest.importorskip(f'{framework}.models')
    absent = sorted(frameworks.FRAMEWORKS.keys() - {framework})
    code, output = run_without(absent, f'''
import kcla_mm
from {framework}.registry import MODELS
print(all(name in MODELS for name in {backbones}))
''')
    assert code == 0 and output.splitlines()[-1] == 'True', output
