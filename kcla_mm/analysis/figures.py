"""Figures of an analysis, for a paper: PNG files of one or two columns' width, drawn from the numbers alone."""
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

COLUMN, PAGE = 3.5, 7.2  # inches
STYLE = {'font.size': 8, 'axes.titlesize': 8, 'axes.linewidth': 0.6, 'xtick.major.width': 0.6, 'ytick.major.width': 0.6,
         'savefig.dpi': 300, 'image.interpolation': 'nearest'}
MAX_PANELS = 16  # heads drawn of a stage; more would not be readable
SMALLEST = 1e-3  # weight that the colours still tell apart


def draw(result, folder):
    """Draws all that an analysis has, and removes the figures of an earlier one that it has not.

    Args:
        result (dict): As `Analysis.result` gives it, or its JSON file has it.
        folder (str or Path): Where the PNG files go.

    Returns:
        list[Path]: The files.
    """
    figures = {}
    with matplotlib.rc_context(STYLE):
        aligned = [stage for stage in result['stages'] if stage['key_alignment'] and stage['blocks'] > 1]
        if aligned:
            figures['key_alignment'] = _key_alignment(aligned)
            for stage in aligned:
                figures[f'key_alignment_stage{stage["stage"]}'] = _heads_alignment(stage)
        if result['depth_weights']:
            figures['depth_weights'] = _depth_weights(result)
            figures['depth_weights_heads'] = _heads_weights(result)
        if any(layer['total_variation'] for layer in result['layers']):
            figures['softmax'] = _softmax(result['layers'])
        if any(layer['gate'] or layer['temperature'] for layer in result['layers']):
            figures['heads'] = _heads(result['layers'])
        figures['memory'] = _memory(result)
        paths = []
        for name, figure in figures.items():
            paths.append(Path(folder, f'{name}.png'))
            FigureCanvasAgg(figure)
            figure.savefig(paths[-1])
    for pattern in 'key_alignment*.png', 'depth_weights*.png', 'softmax.png', 'heads.png':  # an earlier analysis's
        for path in set(Path(folder).glob(pattern)) - set(paths):
            path.unlink()
    return paths


def _figure(width, height):
    return Figure(figsize=(width, height), layout='constrained')


def _heat_map(axes, values, norm=None, text_up_to=4, format='.2f', **colours):
    """A heat map, with numbers in its cells if there are no more than ``text_up_to`` in a row."""
    values = np.array(values, float)
    image = axes.imshow(values, norm=norm, aspect='auto', **colours)
    if values.shape[1] <= text_up_to:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                red, green, blue, _ = image.cmap(image.norm(value))
                bright = 0.3 * red + 0.6 * green + 0.1 * blue > 0.5
                axes.text(column, row, f'{value:{format}}'.replace('-', '−'), ha='center', va='center', fontsize=6.5,
                          color='black' if bright else 'white')
    return image


def _key_alignment(stages):
    lowest = _floor(min(np.nanmin(np.array(stage['key_alignment']['mean'], float)) for stage in stages))
    figure = _figure(PAGE, 2.3)
    panels = figure.subplots(1, len(stages), squeeze=False)[0]
    for axes, stage in zip(panels, stages):
        image = _heat_map(axes, stage['key_alignment']['mean'], vmin=lowest, vmax=1, cmap='viridis')
        _count(axes.set_xticks, stage['blocks'])
        _count(axes.set_yticks, stage['blocks'])
        pairs = stage['key_alignment']['pairs']
        axes.set_title(f'Stage {stage["stage"]}: {pairs["mean"]:.2f} ± {pairs["std"]:.2f}'.replace('-', '−'))
        axes.set_xlabel('Block')
    panels[0].set_ylabel('Block')
    figure.colorbar(image, ax=panels, label='Cosine similarity of keys')
    return figure


def _heads_alignment(stage):
    heads = np.array(stage['key_alignment']['heads'], float)
    shown = np.unique(np.linspace(0, len(heads) - 1, min(len(heads), MAX_PANELS)).round().astype(int))
    columns = min(5, len(shown) + 1)
    rows = -(-(len(shown) + 1) // columns)
    figure = _figure(PAGE, 0.5 + 1.4 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    lowest = _floor(np.nanmin(heads[shown]))
    titled = [('Mean of all heads', np.array(stage['key_alignment']['mean'], float))]
    titled += [(f'Head {head + 1} of {len(heads)}', heads[head]) for head in shown]
    for axes, (title, values) in zip(panels.flat, titled):
        image = _heat_map(axes, values, vmin=lowest, vmax=1, text_up_to=3, cmap='viridis')
        _count(axes.set_xticks, stage['blocks'])
        _count(axes.set_yticks, stage['blocks'])
        axes.set_title(title)
    for axes in panels.flat[len(titled):]:
        axes.set_axis_off()
    figure.supxlabel(f'Block of stage {stage["stage"]}', fontsize=8)
    figure.supylabel(f'Block of stage {stage["stage"]}', fontsize=8)
    figure.colorbar(image, ax=panels, label='Cosine similarity of keys')
    return figure


def _floor(value):
    """The next tenth below, for the lower end of a colour bar."""
    return min(np.floor(value * 10) / 10, 0.9)


def _count(set_ticks, count):
    """Marks a few of the cells along an axis, counted from 1."""
    ticks = np.arange(0, count, -(-count // 6))
    set_ticks(ticks, ticks + 1)


def _stage_ticks(axes, layers, vertical=False, lines=dict(color='0.6', linewidth=0.6)):
    """Marks where stages begin, and names them, along one axis over all blocks."""
    stages = np.array([layer['stage'] for layer in layers])
    numbers = np.unique(stages)
    centres = [np.flatnonzero(stages == number).mean() for number in numbers]
    for number in numbers[1:]:
        border = np.argmax(stages == number) - 0.5
        (axes.axhline if vertical else axes.axvline)(border, **lines)
    if vertical:
        axes.set_yticks(centres, numbers)
    else:
        axes.set_xticks(centres, numbers)
    (axes.yaxis if vertical else axes.xaxis).set_tick_params(length=0)


def _depth_weights(result):
    layers, rows = result['layers'], result['depth_weights']['mean']
    weights = np.full((len(rows), len(rows)), np.nan)
    for index, row in enumerate(rows):
        weights[index, :index + 1] = row
    figure = _figure(COLUMN, 3.1)
    axes = figure.subplots()
    image = _weights_map(axes, weights, text_up_to=8)
    _stage_ticks(axes, layers)
    _stage_ticks(axes, layers, vertical=True)
    axes.set_xlabel('Block read, by stage')
    axes.set_ylabel('Reading block, by stage')
    axes.set_title('Depth weights, mean over heads')
    figure.colorbar(image, ax=axes, label='Weight', extend='min')
    return figure


def _weights_map(axes, weights, text_up_to):
    axes.set_facecolor('0.93')  # of blocks that are not read
    weights = np.where(weights > 0, weights, np.nan)
    return _heat_map(axes, weights, norm=LogNorm(SMALLEST, 1), text_up_to=text_up_to, cmap='viridis')


def _heads_weights(result):
    layers, rows = result['layers'], result['depth_weights']['heads']
    last = [index for index, layer in enumerate(layers)
            if index + 1 == len(layers) or layers[index + 1]['stage'] > layer['stage']]
    figure = _figure(PAGE, 2.5)
    panels = figure.subplots(1, len(last), squeeze=False)[0]
    for axes, index in zip(panels, last):
        values = np.array(rows[index], float)
        image = _weights_map(axes, values, text_up_to=4 if len(values) <= 8 else 0)
        _stage_ticks(axes, layers[:index + 1])
        _count(axes.set_yticks, len(rows[index]))
        axes.set_title(f'Last block of stage {layers[index]["stage"]}')
        axes.set_xlabel('Block read, by stage')
    panels[0].set_ylabel('Head')
    figure.colorbar(image, ax=panels, label='Depth weight', extend='min')
    return figure


def _over_depth(axes, layers, values, label):
    """Points for each head, and the line of their means, over all blocks."""
    means = []
    for index, heads in enumerate(values):
        heads = [] if heads is None else np.array(heads, float)
        axes.plot(np.full(len(heads), index) + np.linspace(-0.2, 0.2, len(heads)), heads, '.', markersize=4,
                  color='#7aa6d6', markeredgewidth=0, zorder=1)
        means.append(np.nanmean(heads) if np.isfinite(heads).any() else np.nan)
    axes.plot(means, 'o-', color='#b2182b', markersize=2.5, linewidth=0.9, zorder=2)
    _stage_ticks(axes, layers)
    axes.set_xlim(-0.6, len(layers) - 0.4)
    axes.set_xlabel('Block, by stage')
    axes.set_ylabel(label)


def _legend(figure):
    """A legend below: points of heads and the line of their means."""
    figure.legend(handles=[Line2D([], [], marker='.', linestyle='', color='#7aa6d6', label='each head'),
                           Line2D([], [], marker='o', markersize=2.5, linewidth=0.9, color='#b2182b',
                                  label='mean over heads')], loc='outside lower center', ncols=2, frameon=False)


def _softmax(layers):
    figure = _figure(PAGE, 2.4)
    panels = figure.subplots(1, 3)
    for axes, (name, label) in zip(panels, [('total_variation', 'Total variation distance'),
                                            ('kl_divergence', 'KL divergence (nats)'),
                                            ('rank_correlation', 'Rank correlation')]):
        _over_depth(axes, layers, [layer[name] and layer[name]['mean'] for layer in layers], label)
    panels[0].set_ylim(bottom=0)
    panels[1].set_ylim(bottom=0)
    panels[2].set_ylim(-1.05, 1.05)
    figure.suptitle("KCLA's depth weights and softmax attention over the blocks of a stage", fontsize=8)
    _legend(figure)
    return figure


def _heads(layers):
    named = {'Head gate': [layer['gate'] and layer['gate']['mean'] for layer in layers],
             'Temperature': [layer['temperature'] for layer in layers],
             'Score': [layer['score'] and layer['score']['mean'] for layer in layers]}
    named = {name: values for name, values in named.items() if any(values)}
    figure = _figure(PAGE if len(named) > 1 else COLUMN, 2.3)
    for axes, (name, values) in zip(figure.subplots(1, len(named), squeeze=False)[0], named.items()):
        _over_depth(axes, layers, values, name)
    _legend(figure)
    return figure


def _memory(result):
    layers, cuts = result['layers'], [stage for stage in result['stages'] if stage['cut']]
    figure = _figure(PAGE if cuts else COLUMN, 2.3)
    panels = figure.subplots(1, 2 if cuts else 1, squeeze=False)[0]
    branch = [layer['branch'] for layer in layers]
    panels[0].bar(range(len(layers)), [value['mean'] for value in branch], yerr=[value['std'] for value in branch],
                  color='#7aa6d6', error_kw=dict(linewidth=0.6))
    _stage_ticks(panels[0], layers)
    panels[0].set_xlim(-0.6, len(layers) - 0.4)
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlabel('Block, by stage')
    panels[0].set_ylabel(r'$\|y - x\|\,/\,\|x\|$')
    panels[0].set_title('Strength of layer attention')
    if cuts:
        changes = np.array([stage['cut']['mean'] for stage in cuts], float)
        image = _heat_map(panels[1], changes, vmin=0, text_up_to=6, format='.2g', cmap='viridis')
        panels[1].set_xticks(range(changes.shape[1]), range(1, changes.shape[1] + 1))
        panels[1].set_yticks(range(len(cuts)), [stage['stage'] for stage in cuts])
        panels[1].set_xlabel('Output of the backbone')
        panels[1].set_ylabel('Stage cut off')
        panels[1].set_title('Change without earlier stages')
        figure.colorbar(image, ax=panels[1], label='Relative change')
    return figure
