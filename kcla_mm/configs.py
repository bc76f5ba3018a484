"""Where the package's configs lie, and ``_base_ = 'kcla_mm::NAME.py'``."""
from pathlib import Path

SCOPE = 'kcla_mm::'


def config_path(name: str) -> str:
    """The path of one of this package's configs.

    A config that is read by a program which has not imported ``kcla_mm`` can
    inherit from ours through it::

        _base_ = __import__('kcla_mm').config_path('faster_rcnn_r101_kcla_coco.py')

    Args:
        name (str): The config's file name, e.g.
            ``'faster_rcnn_r101_kcla_coco.py'``.

    Returns:
        str: The absolute path.

    Raises:
        FileNotFoundError: If there is no such config; lists those there are.
    """
    package = Path(__file__).resolve().parent
    folder = package / '.mim' / 'configs'
    if not folder.is_dir():  # not installed: a checkout of the repository
        folder = package.parent / 'configs'
    names = sorted(path.name for path in folder.glob('*.py'))
    if name not in names:
        raise FileNotFoundError(
            f'kcla_mm has no config {name!r}; it has {", ".join(names)}')
    return str(folder / name)


def register_configs() -> None:
    """Makes MMEngine understand ``_base_ = 'kcla_mm::NAME.py'``.

    MMEngine finds only the packages it lists, and would put the types of a
    base from ``kcla_mm`` in a scope of that name; they belong in the scope of
    the framework's config underneath. It is also taught to find the configs of
    ``mmseg::`` in every release of MMSegmentation.
    """
    from mmengine.config import Config
    from mmengine.config.utils import MODULE2PACKAGE
    from mmengine.utils import is_installed
    if is_installed('mmseg') and not is_installed('mmsegmentation'):
        MODULE2PACKAGE['mmseg'] = 'mmseg'  # onedl-mmsegmentation: MMEngine looks for the original's name alone
    original = Config._get_cfg_path
    if getattr(original, 'knows_kcla_mm', False):
        return

    def get_cfg_path(cfg_path, filename):
        if cfg_path.startswith(SCOPE):
            return config_path(cfg_path[len(SCOPE):]), None
        return original(cfg_path, filename)

    get_cfg_path.knows_kcla_mm = True
    Config._get_cfg_path = staticmethod(get_cfg_path)
