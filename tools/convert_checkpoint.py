"""Makes a checkpoint of the published KCLA, MRLA or DLA code one that KCLAResNet loads.

    python tools/convert_checkpoint.py kcla_resnet50.pth.tar kcla_resnet50.pth

SRC is an ImageNet ResNet with KCLA, MRLA-B, MRLA-L or DLA-L: a training checkpoint or a bare state dict, of
DataParallel or not. What the backbone has no use for (the classifier, constants, parameters that the published code
never uses) is dropped and listed. The weights do not tell how wide the heads of MRLA and DLA are: they are taken to be
as published, 16 channels for MRLA-B, 32 for MRLA-L and DLA-L.
"""
import os
import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.util import find_spec
from pathlib import Path

if find_spec('kcla_mm') is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from kcla_mm.backbones.mmdet import KCLAResNet
from kcla_mm.cli import user_errors

STATE_DICTS = 'state_dict', 'model', 'model_state', 'model_state_dict'  # where training checkpoints keep it
BLOCK = r'(layer\d)\.(?:layers\.|attention\.)?(\d+)\.'
KCLA = {  # names in the attention of a block, which is the block's child here
    r'Wq\.weight$': 'query',
    r'Wk\.weight$': 'key',
    r'Wv\.weight$': 'value',
    r'head_att\.weight$': 'gate',
    r'bn_attention\.': 'norm.',
    r'adjust_channel\.weight$': 'memory_conv',
    r'u_Wk\.weight$': 'memory_key',
    r'u_bn\.': 'memory_norm.',
}
MRLA_DLA = {
    r'(?:mrla|layer_attention)\.mrla\.Wq\.weight$': 'query',
    r'(?:mrla|layer_attention)\.mrla\.Wk\.weight$': 'key',
    r'(?:mrla|layer_attention)\.mrla\.Wv\.weight$': 'value',
    r'(?:mrla|layer_attention)\.lambda_t$': 'shortcut_weight',
    r'bn_(?:mrla|layer_attention)\.': 'norm.',
}
SHARED = {  # names in what the blocks of a stage share, a child of the first block's attention here
    r'lstm\.w_ih\.0\.seq\.0\.': 'input.reduce_',
    r'lstm\.w_ih\.0\.seq\.2\.': 'input.expand_',
    r'lstm\.w_hh\.0\.seq\.0\.': 'hidden.reduce_',
    r'lstm\.w_hh\.0\.seq\.2\.': 'hidden.expand_',
    r'extict\.weight$': 'value',
}
RENAMED = {
    r'conv1\.(\d)\.': r'stem.\1.',
    r'(conv1|bn1)\.': r'\1.',
    **{BLOCK + name: r'\1.\2.layer_attention.' + new for name, new in {**KCLA, **MRLA_DLA}.items()},
    **{r'(layer\d)\.' + name: r'\1.0.layer_attention.unit.' + new for name, new in SHARED.items()},
    r'(layer\d)\.(?:layers\.)?(\d+)\.(conv\d|bn\d|downsample)\.': r'\1.\2.\3.',
}
DROPPED = {
    r'fc\.': 'classifier',
    r'.*\.norm_d$': 'constant',
    r'layer1\.attention\.0\.(adjust_channel|u_Wk|u_bn)\.': 'never used: the first stage has no memory to adapt',
    r'layer\d\.attention\.11\.adjust_channel\.': 'never used: the refresh has no convolution',
}


def main():
    args = parse_args()
    with user_errors():
        check_destination(Path(args.dst), args.force)
        source = read(args.src, args.unsafe_load)
        try:
            backbone, state_dict, dropped = convert(source)
        except ValueError as error:
            raise ValueError(f'{args.src} is not a checkpoint of a published ImageNet model with KCLA, MRLA or DLA: '
                             f'{error}') from None
        for key, reason in dropped.items():
            print(f'dropped {key} ({reason})')
        write(dict(meta=dict(backbone=backbone), state_dict=state_dict), Path(args.dst))
    print(f'Wrote {args.dst}: {len(state_dict)} entries, {len(dropped)} dropped. Start from it with\n'
          f'    backbone=dict({", ".join(f"{key}={value!r}" for key, value in backbone.items())},\n'
          f"                  init_cfg=dict(type='Pretrained', checkpoint={args.dst!r}))")


def parse_args():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument('src', metavar='SRC', help='a checkpoint of the published code')
    parser.add_argument('dst', metavar='DST', help='the file to write')
    parser.add_argument('--force', action='store_true', help='replace DST if there is one')
    parser.add_argument('--unsafe-load', action='store_true',
                        help='read SRC even if that runs code in it: only if you trust where it comes from')
    return parser.parse_args()


def check_destination(dst, force):
    if not dst.parent.is_dir():
        raise FileNotFoundError(f'the folder of DST, {dst.parent}, does not exist')
    if dst.is_dir():
        raise IsADirectoryError(f'DST must be a file, {dst} is a folder')
    if dst.exists() and not force:
        raise FileExistsError(f'{dst} exists: choose another DST, or replace it with --force')


def read(src, unsafe=False):
    """The state dict in a file.

    Raises:
        ValueError: If the file is broken, something else, or would run code and ``unsafe`` is False.
    """
    if not os.path.isfile(src):
        raise FileNotFoundError(f'SRC, {src}, does not exist')
    try:
        checkpoint = torch.load(src, map_location='cpu', weights_only=not unsafe)
    except Exception as error:  # what torch.load raises of a file that is no checkpoint may be anything
        reason = ' '.join(str(error).split()).split('WeightsUnpickler error: ')[-1].split(' Check the doc')[0]
        refused = re.search(r'(?:GLOBAL|Unsupported class) (\S+)', reason)
        if refused:
            raise ValueError(f'{src} holds {refused[1]} besides weights, and loading it could run any code. '
                             'If you trust where the file comes from: --unsafe-load') from None
        raise ValueError(f'{src} is not a PyTorch checkpoint, or not all of it '
                         f'({type(error).__name__}: {reason[:150]})') from None
    for key in STATE_DICTS:
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(key), dict):
            return checkpoint[key]
    return checkpoint


def convert(source):
    """Renames the entries of a state dict of the published code.

    Args:
        source (dict[str, Tensor]): The state dict.

    Returns:
        tuple[dict, dict, dict]: The backbone's config; its state dict; the reasons, by name, why entries were dropped.

    Raises:
        ValueError: If it is not the state dict of a published ImageNet model with KCLA, MRLA or DLA.
    """
    if not (isinstance(source, dict) and source
            and all(isinstance(key, str) and torch.is_tensor(value) for key, value in source.items())):
        raise ValueError(f'no state dict, bare or under {" or ".join(map(repr, STATE_DICTS))}')
    if all(key.startswith('module.') for key in source):
        source = {key[len('module.'):]: value for key, value in source.items()}
    state_dict, dropped, unknown = {}, {}, []
    deep_stem = 'conv1.0.weight' in source
    for original, value in source.items():
        key = re.sub(r'^stages\.(\d)\.', lambda match: f'layer{int(match[1]) + 1}.', original)
        if deep_stem:
            key = re.sub(r'^bn1\.', 'conv1.7.', key)  # behind the last of the stem's convolutions, conv1.6
        reason = next((reason for pattern, reason in DROPPED.items() if re.match(pattern, key)), None)
        if reason:
            dropped[original] = reason
            continue
        for pattern, new in RENAMED.items():
            renamed, matched = re.subn('^' + pattern, new, key)
            if matched:
                state_dict[renamed] = value
                break
        else:
            unknown.append(original)
    if unknown:
        raise ValueError(f'it has {len(unknown)} unknown entries such as {", ".join(unknown[:3])}')
    backbone = recognise(state_dict)
    try:
        KCLAResNet(**{key: value for key, value in backbone.items() if key != 'type'}).load_state_dict(state_dict)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    return backbone, state_dict, dropped


def recognise(state_dict):
    """The config of the backbone that a state dict is of."""
    blocks = [len({key.split('.')[1] for key in state_dict if key.startswith(f'layer{stage}.')})
              for stage in (1, 2, 3, 4)]
    bottleneck = 'layer1.0.conv3.weight' in state_dict
    for depth, (block, numbers) in KCLAResNet.arch_settings.items():
        if list(numbers) == blocks and (block.expansion == 4) == bottleneck:
            break
    else:
        raise ValueError(f'no ResNet has stages of {blocks} {"bottleneck" if bottleneck else "basic"} blocks')
    deep_stem = dict(deep_stem=True) if 'stem.0.weight' in state_dict else {}
    return dict(type='KCLAResNet', depth=depth, **deep_stem, **recognise_attention(state_dict))


def recognise_attention(state_dict):
    """The backbone's argument ``attention``, nothing where it is the default."""
    prefix = 'layer1.0.layer_attention.'
    names = {key[len(prefix):] for key in state_dict if key.startswith(prefix)}
    if {'gate', 'value'} <= names:
        head_channels = len(state_dict[prefix + 'value']) // len(state_dict[prefix + 'gate'])
        return {} if head_channels == 64 else dict(attention=dict(type='KCLA', head_channels=head_channels))
    # The others have no parameter that tells the width of their heads: it is the default, which is the published one.
    for type, name in dict(DLALight='unit.value', MRLALight='shortcut_weight', MRLABase='query').items():
        if name in names:
            return dict(attention=dict(type=type))
    raise ValueError('it has no layer attention')


def write(checkpoint, dst):
    """Writes a checkpoint that appears under its name once it is whole."""
    unfinished = dst.with_name(f'.{dst.name}.{os.getpid()}')
    try:
        torch.save(checkpoint, unfinished)
        os.replace(unfinished, dst)
    finally:
        unfinished.unlink(missing_ok=True)


if __name__ == '__main__':
    main()
