"""Exports a model to ONNX, runs the file in ONNX Runtime, and keeps it if it agrees with PyTorch.

    python tools/export_onnx.py configs/unet_kcla_kvasir.py best_DSC_epoch_300.pth --out unet.onnx

The input, ``image``, is (N, 3, H, W) in float32: an image as the config's test pipeline loads it, values 0 to 255, of an
image file in the order blue, green, red (cv2.imread). N, H and W are free. The order of channels, mean and standard
deviation of the data preprocessor are part of the graph; resizing and padding are not. The outputs are

    of a segmenter             logits (N, classes, H, W), of the image's size; where classes are told apart by one map,
                               its sigmoid is the probability
    of a classifier            scores (N, classes), after softmax or, of several labels, sigmoid
    of a one-stage detector    head0_level0, head0_level1, ..., head1_level0, ...: the maps of the head, such as classes
                               and boxes, before they are decoded: anchors and NMS are not exported
    of another detector        feature0, feature1, ...: the maps of backbone and neck alone

The file says so in its metadata, and names the classes if the checkpoint does. What is compared are random images of
other number and size than those that were traced: the greatest difference, relative to the output's greatest value, has
to be below 1e-4.
"""
import inspect
import json
import os
import sys
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

if find_spec('kcla_mm') is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from kcla_mm.cli import build_model, check_files, load_weights, read_config, user_errors
from mmengine.config import DictAction
from mmengine.model import revert_sync_batchnorm
from torch import nn
from torch.onnx.symbolic_helper import parse_args

OPSET = 17  # the newest that the exporter of PyTorch 2.1 knows
TOLERANCE = 1e-4
TRACED, COMPARED = (2, 96, 128), (3, 77, 109)  # number, height and width of the images


def main():
    with user_errors():
        args = command_line()
        check_installed()
        cfg = read_config(args.config, args.cfg_options)
        cfg.load_from = args.checkpoint
        check_files(cfg, 'load_from')
        check_out(args.out)
        network, metadata = load(cfg, args.checkpoint)
        metadata['input'] = 'image: float32, 0 to 255, as the test pipeline loads it (image files: blue, green, red)'
        print(f'Exporting {metadata["output"]}')
        export(network, args.out, metadata)
    print(f'Wrote {args.out}')


def command_line():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument('config', help='a file, or a zoo name such as kcla_mm::faster_rcnn_r101_kcla_coco.py')
    parser.add_argument('checkpoint', help='a file or URL')
    parser.add_argument('--out', required=True, metavar='FILE', help='the file to write, NAME.onnx')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={}, metavar='KEY=VALUE',
                        help='changes to the config')
    return parser.parse_args()


def check_installed():
    missing = [name for name in ('onnx', 'onnxruntime') if find_spec(name) is None]
    if missing:
        raise ImportError(f'the export needs {" and ".join(missing)}: pip install {" ".join(missing)}')


def check_out(out):
    if not out.endswith('.onnx'):
        raise ValueError(f'--out must end in .onnx, got {out}')
    if os.path.isdir(out):
        raise IsADirectoryError(f'--out {out} is a folder')
    os.makedirs(os.path.dirname(out) or '.', exist_ok=True)


def load(cfg, checkpoint):
    """The network that is exported, from images to named outputs, and what the file will say of it.

    Args:
        cfg (Config): The config of a model.
        checkpoint (str): Its weights: a file or URL.

    Returns:
        tuple[nn.Module, dict[str, str]]: The network, and the metadata.

    Raises:
        ValueError: If the config is of another framework, or the checkpoint cannot be read or lacks parameters.
    """
    scope = cfg.get('default_scope')
    if scope not in NETWORKS:
        raise ValueError(f'the config must be of {" or ".join(NETWORKS)}, got default_scope={scope!r}')
    import_module(f'{scope}.utils').register_all_modules(init_default_scope=False)
    model = build_model(cfg)
    meta = load_weights(model, checkpoint).get('meta', {})
    model = revert_sync_batchnorm(model)
    network = NETWORKS[scope](model)
    metadata = dict(output=network.output)
    classes = meta.get('dataset_meta', {}).get('classes')
    if classes:
        metadata['classes'] = json.dumps(list(classes))
    return network, metadata


class Preprocessed(nn.Module):
    """A model behind its data preprocessor, written in operations that know no fixed size."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        preprocessor = model.data_preprocessor
        self.swaps_channels = any(getattr(preprocessor, name, False)  # in MMDetection, MMSegmentation, MMPretrain
                                  for name in ('_channel_conversion', 'channel_conversion', 'to_rgb'))
        self.normalises = getattr(preprocessor, '_enable_normalize', False)
        self.channels = len(preprocessor.mean) if self.normalises else 3

    def forward(self, image):
        if self.swaps_channels and self.channels == 3:
            image = image.flip(1)
        if self.normalises:
            image = (image - self.model.data_preprocessor.mean) / self.model.data_preprocessor.std
        return self.run(image)


class Segmenter(Preprocessed):
    output = 'logits, of the image\'s size'

    def run(self, image):
        size = image.shape[2:]
        return {'logits': self.model.encode_decode(image, [dict(img_shape=size, ori_shape=size, pad_shape=size)])}


class Classifier(Preprocessed):
    output = 'scores of the classes'

    def run(self, image):
        from mmpretrain.models.heads import MultiLabelClsHead
        scores = self.model(image, mode='tensor')
        several = isinstance(self.model.head, MultiLabelClsHead)
        return {'scores': scores.sigmoid() if several else scores.softmax(1)}


class DenseDetector(Preprocessed):
    output = 'the maps of a one-stage detector\'s head: decoding them, with anchors and NMS, is left to you'

    def run(self, image):
        outputs = self.model(image, mode='tensor')
        return {f'head{i}_level{j}': level for i, levels in enumerate(outputs) for j, level in enumerate(levels)}


class FeatureExtractor(Preprocessed):
    output = 'backbone and neck alone: the rest of this detector does not fit into an ONNX graph'

    def run(self, image):
        return {f'feature{i}': map for i, map in enumerate(self.model.extract_feat(image))}


def detector(model):
    from mmdet.models.detectors import SingleStageDetector
    return (DenseDetector if isinstance(model, SingleStageDetector) else FeatureExtractor)(model)


NETWORKS = {'mmdet': detector, 'mmseg': Segmenter, 'mmpretrain': Classifier}


def export(network, out, metadata=()):
    """Exports a network, and checks the file before it appears under its name.

    Args:
        network (nn.Module): From images, (N, 3, H, W), to a dict of named outputs.
        out (str): The file to write.
        metadata (dict[str, str]): What the file says of itself. Defaults to nothing.

    Returns:
        dict[str, float]: The greatest difference between ONNX Runtime and PyTorch, by output, relative to the output's
        greatest value.

    Raises:
        ValueError: If an operation has no counterpart in ONNX, or the file does not agree with PyTorch.
    """
    import onnx
    network.eval()
    unfinished = Path(out).with_name(f'.{Path(out).name}.{os.getpid()}')
    try:
        trace(network, unfinished)
        graph = onnx.load(str(unfinished))
        onnx.helper.set_model_props(graph, dict(metadata))
        onnx.checker.check_model(graph)
        onnx.save(graph, str(unfinished))
        differences = compare(network, unfinished)
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
    return differences


@torch.no_grad()
def trace(network, path):
    """Writes the graph of a network, with batch, height and width free."""
    images = random_images(network, TRACED)
    outputs = network(images)
    free = {name: {0: 'batch', **({2: f'{name}_height', 3: f'{name}_width'} if output.ndim == 4 else {})}
            for name, output in {'image': images, **outputs}.items()}
    # PyTorch 2.1 has this exporter alone; later ones deprecate it, but theirs needs one more package.
    older = dict(dynamo=False) if 'dynamo' in inspect.signature(torch.onnx.export).parameters else {}
    for name, operation in OPERATIONS.items():
        torch.onnx.register_custom_op_symbolic(name, operation, OPSET)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # of sizes that the frameworks compare: `compare` tells what counts
            torch.onnx.export(Tuple(network).eval(), (images, ), str(path), opset_version=OPSET, input_names=['image'],
                              output_names=list(outputs), dynamic_axes=free, **older)
    except torch.onnx.errors.OnnxExporterError as error:
        raise ValueError(f'the model has something that ONNX has not: {" ".join(str(error).split())[:500]}') from None
    finally:
        for name in OPERATIONS:
            torch.onnx.unregister_custom_op_symbolic(name, OPSET)


def logaddexp(graph, a, b):
    """log(exp a + exp b), which ONNX lacks, as max(a, b) + log(1 + exp(-|a - b|))."""
    distance = graph.op('Abs', graph.op('Sub', a, b))
    rest = graph.op('Softplus', graph.op('Neg', distance))
    return graph.op('Add', graph.op('Max', a, b), rest)


@parse_args('v', 'i', 'i', 'i')
def unfold(graph, x, dim, size, step):
    """Windows of a tensor, which PyTorch exports of fixed sizes alone, from its slices."""
    if dim != -1 or step != 1:
        raise torch.onnx.errors.SymbolicValueError('only windows of the last dimension that move by 1 are known', x)
    starts = [torch.tensor([i]) for i in range(size)]
    ends = [*(start - size + 1 for start in starts[:-1]), torch.tensor([torch.iinfo(torch.int64).max])]
    last = graph.op('Constant', value_t=torch.tensor([-1]))
    slices = [graph.op('Slice', x, graph.op('Constant', value_t=start), graph.op('Constant', value_t=end), last)
              for start, end in zip(starts, ends)]
    return graph.op('Concat', *(graph.op('Unsqueeze', part, last) for part in slices), axis_i=-1)


OPERATIONS = {'aten::logaddexp': logaddexp, 'aten::unfold': unfold}  # of layer attention


class Tuple(nn.Module):
    """A network that gives its outputs without their names."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, image):
        return tuple(self.network(image).values())


@torch.no_grad()
def compare(network, path):
    """Runs a file beside the network it came from; see :func:`export`."""
    import onnxruntime
    images = random_images(network, COMPARED)
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    differences = {}
    for (name, expected), found in zip(network(images).items(), session.run(None, {'image': images.numpy()})):
        found = torch.from_numpy(found)
        if found.shape != expected.shape:
            raise ValueError(f'ONNX Runtime gives {name} of shape {tuple(found.shape)}, PyTorch of '
                             f'{tuple(expected.shape)}: the model depends on the size of the images that it was traced '
                             'with')
        difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
        print(f'{name} {tuple(found.shape)}: greatest difference from PyTorch {difference:.1e} of the greatest value')
        if not difference < TOLERANCE:
            raise ValueError(f'{name} of ONNX Runtime differs from PyTorch by {difference:.1e} of its greatest value, '
                             f'{TOLERANCE:.0e} is allowed')
        differences[name] = difference
    return differences


def random_images(network, size):
    number, height, width = size
    return torch.rand(number, getattr(network, 'channels', 3), height, width) * 255


if __name__ == '__main__':
    main()
