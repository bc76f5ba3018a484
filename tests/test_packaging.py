import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mmengine.config import Config

import kcla_mm
from kcla_mm.configs import register_configs

ROOT = Path(kcla_mm.__file__).parents[1]


def run(*command, cwd, **environment):
    done = subprocess.run([sys.executable, *command], cwd=cwd, env={**os.environ, **environment},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    """The folder into which the package was installed from its source distribution."""
    source, target = tmp_path_factory.mktemp('source'), tmp_path_factory.mktemp('installed')
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    for name in ('kcla_mm', 'configs', 'tools', 'tests', 'requirements'):
        shutil.copytree(ROOT / name, source / name)
    run('setup.py', '-q', 'sdist', cwd=source)
    sdist, = (source / 'dist').iterdir()
    run('-m', 'pip', 'install', '-q', '--no-deps', '--no-build-isolation', '--no-index', '--target', target, sdist,
        cwd=target)
    assert not (source / 'kcla_mm' / '.mim').exists()
    return target


@pytest.fixture
def project(tmp_path):
    """A folder of another project."""
    return tmp_path


def inherit(installed, project, base, program=''):
    """The types of model and backbone of a config with this base, read by another program."""
    (project / 'config.py').write_text(f'_base_ = {base}\n')
    return run('-c', f'{program}\nfrom mmengine.config import Config\nmodel = Config.fromfile("config.py").model\n'
               'print(model["_scope_"], model.type, model.backbone.type, model.backbone.depth)',
               cwd=project, PYTHONPATH=str(installed)).splitlines()[-1]


FASTER_RCNN = 'mmdet FasterRCNN KCLAResNet 101'


def test_configs_tools_and_index_are_installed(installed):
    mim = installed / 'kcla_mm' / '.mim'
    for name in ('configs', 'tools'):
        assert ({path.name for path in (mim / name).iterdir() if path.name != '__pycache__'}
                == {path.name for path in (ROOT / name).iterdir() if path.name != '__pycache__'})
    assert (mim / 'model-index.yml').read_bytes() == (ROOT / 'model-index.yml').read_bytes()


def test_the_installed_package_is_the_one_that_runs(installed, project):
    path = run('-c', 'import kcla_mm; print(kcla_mm.__version__, kcla_mm.config_path("mask_rcnn_r50_kcla_coco.py"))',
               cwd=project, PYTHONPATH=str(installed)).splitlines()[-1]
    assert path == f'{kcla_mm.__version__} {installed}/kcla_mm/.mim/configs/mask_rcnn_r50_kcla_coco.py'


def test_nothing_is_required_by_name(installed):
    metadata, = installed.glob('kcla_mm-*.dist-info/METADATA')
    assert 'Requires-Dist' not in metadata.read_text()


def test_another_project_inherits_by_name(installed, project):
    base = "'kcla_mm::faster_rcnn_r101_kcla_coco.py'"
    assert inherit(installed, project, base, program='import kcla_mm') == FASTER_RCNN


@pytest.mark.parametrize('base', ['{}', '[{}]'])
def test_another_project_inherits_without_importing_the_package_first(installed, project, base):
    path = "__import__('kcla_mm').config_path('faster_rcnn_r101_kcla_coco.py')"
    assert inherit(installed, project, base.format(path)) == FASTER_RCNN


def test_a_checkout_finds_its_own_configs(project):
    for _ in range(2):
        register_configs()
    (project / 'config.py').write_text("_base_ = 'kcla_mm::faster_rcnn_r50_kcla_coco.py'")
    assert (Config.fromfile(project / 'config.py').to_dict()
            == Config.fromfile(ROOT / 'configs' / 'faster_rcnn_r50_kcla_coco.py').to_dict())


@pytest.mark.parametrize('name', ['faster_rcnn_r51_kcla_coco.py', '', '../setup.py'])
def test_an_unknown_config_lists_the_known(project, name):
    (project / 'config.py').write_text(f"_base_ = 'kcla_mm::{name}'")
    with pytest.raises(FileNotFoundError, match=rf"no config '{name}'.*, mask_rcnn_r101_kcla_coco.py"):
        Config.fromfile(project / 'config.py')


def test_the_model_index_lists_the_coco_configs():
    index = yaml.safe_load((ROOT / 'model-index.yml').read_text())
    configs = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'configs').glob('*_coco.py')}
    assert {model['Config'] for model in index['Models']} == configs
    assert {model['In Collection'] for model in index['Models']} == {index['Collections'][0]['Name']}
