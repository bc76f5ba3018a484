"""What the tools that draw data sets share: their arguments, and a folder that is there when it is complete."""
import argparse
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np


def image_rng(info, split, number):
    """The source of all that is random in an image: the same on any machine, whatever else is drawn."""
    return np.random.default_rng([info['seed'], split == 'val', number])


def write_image(path, image, *options):
    """Writes an image, BGR or grey, with OpenCV's options for its kind of file."""
    if not cv2.imwrite(str(path), image, options):
        raise OSError(f'could not write {path}')


def make_data_set(out, info, draw, is_drawn):
    """Draws a data set into a new folder, or keeps the one that is there if it is this very data set.

    The folder appears when it is complete, never before.

    Args:
        out (Path): The folder.
        info (dict): What the data set is: a description and the arguments that it is drawn from.
        draw (callable): ``draw(folder, info)`` draws it into a folder.
        is_drawn (callable): ``is_drawn(folder, info)`` says whether a folder holds all of it.

    Returns:
        bool: False if the data set was there already.

    Raises:
        FileExistsError: If ``out`` is there and is not this data set, whole. Nothing in it is touched.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if is_drawn(out, info):
            return False
        arguments = ', '.join(f'{name}={value}' for name, value in info.items() if name != 'description')
        raise FileExistsError(f'{out} is there, but is not this data set ({arguments}) or lacks files of it: remove it '
                              'or name another folder')
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f'.{out.name}-', dir=out.parent) as temporary:
        folder = Path(temporary) / 'data'
        folder.mkdir()
        draw(folder, info)
        folder.rename(out)
    return True


def at_least(lowest):
    def number(text):
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f'must be at least {lowest}, got {value}')
        return value
    return number


def main(usage, description, draw, is_drawn, train, val, size):
    """Runs a tool: the texts of its help and of its ``info``, see `make_data_set`, and its default arguments."""
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out', type=Path, metavar='OUT', help='folder to make')
    for name, kind, lowest, default in (('train', 'number of training images', 1, train),
                                        ('val', 'number of validation images', 1, val),
                                        ('size', 'height and width in pixels', 64, size),
                                        ('seed', 'another seed, another data set', 0, 0)):
        parser.add_argument(f'--{name}', type=at_least(lowest), default=default, help=f'{kind} (default: {default})')
    info = dict(description=description, **vars(parser.parse_args()))
    out = info.pop('out')
    try:
        drawn = make_data_set(out, info, draw, is_drawn)
    except OSError as error:
        sys.exit(f'error: {error}')
    print(f'{out}: {"drew" if drawn else "kept"} {info["train"]} training and {info["val"]} validation images')
