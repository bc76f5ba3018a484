"""Runs the tools as a user does, on a few drawn images."""
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parents[1] / 'tools'


@pytest.fixture(scope='session')
def run_tool():
    """Runs a tool in a folder. Returns all that it printed; ``status`` is how it should end."""
    def run(name, *args, cwd, status=0, launcher=()):
        command = [*(launcher or [sys.executable]), str(TOOLS / name), *map(str, args)]
        environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(HERE), 'CUDA_VISIBLE_DEVICES': ''}
        done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              universal_newlines=True)
        assert done.returncode == status, f'{name} ended with {done.returncode}:\n{done.stdout[-10000:]}'
        return done.stdout
    return run


def import_tool(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='session')
def tool():
    """Imports a tool."""
    return import_tool


@pytest.fixture
def mistake(monkeypatch):
    """Runs a tool in a folder, in this process, and returns the message with which it ends."""
    def run(name, *args, cwd):
        monkeypatch.syspath_prepend(HERE)
        monkeypatch.chdir(cwd)
        monkeypatch.setattr('sys.argv', [name, *map(str, args)])
        with pytest.raises(SystemExit) as end:
            import_tool(name).main()
        return end.value.code
    return run


@pytest.fixture(scope='session')
def shapes(run_tool, tmp_path_factory):
    """A folder with data/shapes, drawn small."""
    folder = tmp_path_factory.mktemp('shapes')
    run_tool('draw_shapes.py', 'data/shapes', '--train', 8, '--val', 4, '--size', 96, cwd=folder)
    return folder


@pytest.fixture(scope='session')
def trained(run_tool, shapes):
    """A folder in which the config tiny.py was trained for two epochs, and what that printed."""
    (shapes / 'tiny.py').write_text("""
_base_ = 'kcla_mm::faster_rcnn_r18_kcla_shapes.py'
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False)
val_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False)
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=2, val_interval=2)
param_scheduler = []
default_hooks = dict(checkpoint=dict(max_keep_ckpts=-1))
""")
    return shapes, run_tool('train.py', 'tiny.py', cwd=shapes)
