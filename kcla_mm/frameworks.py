"""Which OpenMMLab packages are installed, and whether this package works with them."""
import warnings
from importlib import import_module
from importlib.util import find_spec

# name: lowest version, first version that is too new, the two releases known to work
NEEDED = {
    'mmengine': ('0.10.0', '1.0.0', 'mmengine==0.10.7 or onedl-mmengine==0.10.12'),
    'mmcv': ('2.0.0', '3.0.0', 'mmcv==2.1.0 or onedl-mmcv==2.3.6'),
}
FRAMEWORKS = {
    'mmdet': ('3.1.0', '4.0.0', 'mmdet==3.3.0 or onedl-mmdetection==3.5.1'),
    'mmseg': ('1.1.0', '2.0.0', 'mmsegmentation==1.2.2 or onedl-mmsegmentation==1.4.2'),
    'mmpretrain': ('1.0.0', '2.0.0', 'mmpretrain==1.2.0 or onedl-mmpretrain==1.3.6'),
}


def check_version(name):
    """Imports an OpenMMLab package and checks its version.

    Args:
        name (str): Its import name, a key of `NEEDED` or `FRAMEWORKS`.

    Raises:
        ImportError: If the package is missing, too old or too new. The message says what to install.
    """
    lowest, too_new, known = {**NEEDED, **FRAMEWORKS}[name]
    if find_spec(name) is None:
        raise ImportError(f'kcla_mm needs {name}>={lowest},<{too_new}, which is not installed: '
                          f'pip install {known}')
    from mmengine.utils import digit_version
    version = import_module(name).__version__
    if not digit_version(lowest) <= digit_version(version) < digit_version(too_new):
        raise ImportError(f'kcla_mm needs {name}>={lowest},<{too_new}, but {name} {version} is installed: '
                          f'pip install {known}')


def check_needed():
    """Checks mmengine and mmcv.

    Raises:
        ImportError: If one is missing, too old or too new.
    """
    for name in NEEDED:
        check_version(name)


def import_installed(package):
    """Imports the modules of ``package`` that are named after the frameworks installed.

    A framework that is installed but does not import is passed over with a warning as long as another one does.

    Returns:
        list[str]: The frameworks whose modules were imported.

    Raises:
        ImportError: If no framework is left.
    """
    installed = [name for name in FRAMEWORKS if find_spec(name)]
    if not installed:
        raise ImportError('kcla_mm needs at least one framework, but none is installed: pip install '
                          + ', '.join(known for _, _, known in FRAMEWORKS.values()))
    errors = {}
    for name in installed:
        try:
            check_version(name)
            import_module(f'{package}.{name}')
        except (ImportError, AssertionError) as error:  # frameworks assert the version of mmcv
            errors[name] = error
    if len(errors) == len(installed):
        raise ImportError('; '.join(f'{name}: {error}' for name, error in errors.items()))
    for name, error in errors.items():
        warnings.warn(f'kcla_mm leaves {name} out, which does not import: {error}')
    return [name for name in installed if name not in errors]
