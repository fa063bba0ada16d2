"""Draws how a video is distributed over ranks: tokens while it is denoised, columns and blocks while its frames are decoded.

    python tools/draw_video.py --out docs/video-ranks.svg

A token is a patch of the latents. Tokens are cut into equal parts in their order: frame by frame, and in a frame row by row. Frames
are decoded in columns of the latents, as many on each rank, and each convolution takes one border column from both neighbours; a rank's
columns pass through the network in blocks: band of rows after band of rows, and in a band one group of frames after another. What the next
block needs of the last one is kept.
"""

import argparse
import pathlib

COLORS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222222"]
CELL = 14


def rectangle(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" {more}/>'


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def denoising(frames: int, rows: int, columns: int, ranks: int) -> tuple[list[str], int]:
    """Frames side by side, each token in the color of its rank."""
    count, shapes = frames * rows * columns, []
    ends = [sum(count // ranks + (rank < count % ranks) for rank in range(last + 1)) for last in range(ranks)]
    for token in range(count):
        frame, row, column = token // (rows * columns), token // columns % rows, token % columns
        rank = next(rank for rank, end in enumerate(ends) if token < end)
        x = 20 + frame * (columns + 1) * CELL + column * CELL
        shapes.append(rectangle(x, 54 + row * CELL, CELL - 1, CELL - 1, COLORS[rank]))
    for frame in range(frames):
        shapes.append(text(20 + frame * (columns + 1) * CELL, 48, f"latent frame {frame}"))
    title = f"Denoising: {count} tokens on {ranks} ranks, in the order of frames, rows and columns"
    shapes.insert(0, text(20, 24, title, 14))
    return shapes, 20 + frames * (columns + 1) * CELL


def decoding(top: int, rows: int, columns: int, ranks: int, bands: int) -> tuple[list[str], int, int]:
    """The latent columns of each rank apart, with the border columns of its neighbours, and the order of its bands."""
    each, band = -(-columns // ranks), -(-rows // bands)
    shapes, x = [text(20, top, f"Decoding: columns on {ranks} ranks, with border columns of their neighbours", 14)], 20.0
    for rank in range(ranks):
        first, last = rank * each, min((rank + 1) * each, columns)
        left, right = first > 0, last < columns
        shapes.append(text(x, top + 24, f"rank {rank}"))
        begin = x
        for column in range(first - left, last + right):
            own = first <= column < last
            owner = rank if own else rank + (1 if column >= last else -1)
            for row in range(rows):
                look = "" if own else 'fill-opacity="0.35" stroke="#555" stroke-dasharray="2 2"'
                shapes.append(rectangle(x, top + 30 + row * CELL, CELL - 1, CELL - 1, COLORS[owner], look))
            x += CELL
        for number in range(bands):
            y = top + 30 + number * band * CELL
            height = min(band, rows - number * band) * CELL
            inner = begin + left * CELL
            outline = 'stroke="#000" stroke-width="1.5"'
            shapes.append(rectangle(inner - 0.5, y - 0.5, (last - first) * CELL, height, "none", outline))
            shapes.append(text(inner + (last - first) * CELL / 2, y + height / 2 + 4, str(number + 1), 12, "middle"))
        x += 1.5 * CELL
    words = "Boxes are bands in their order; all groups of frames pass through a band before the next one begins."
    bottom = top + 30 + rows * CELL + 20
    return [*shapes, text(20, bottom, words)], int(x), bottom


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--frames", type=int, default=3)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--bands", type=int, default=3)
    arguments = parser.parse_args()
    if not 1 <= arguments.ranks <= min(len(COLORS), arguments.columns):
        parser.error(f"--ranks {arguments.ranks}: from 1 to {min(len(COLORS), arguments.columns)}")
    top, wide = denoising(arguments.frames, arguments.rows, arguments.columns, arguments.ranks)
    second = 54 + arguments.rows * CELL + 40
    below, wider, bottom = decoding(second, arguments.rows, arguments.columns, arguments.ranks, arguments.bands)
    width, height = max(wide, wider, 640) + 20, bottom + 16
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    shapes = [rectangle(0, 0, width, height, "#ffffff"), *top, *below]
    arguments.out.write_text("\n".join([head, *shapes, "</svg>", ""]))


if __name__ == "__main__":
    main()
