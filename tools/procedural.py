"""Made-up glyphs: random strokes, loops and filled shapes, drawn in 32 x 32 pixels.

No alphabet and no digit is in here: every picture is a handful of random curves, drawn as a hand would.

Coordinates run from -1 to 1 on both axes. All randomness comes from the generator that is passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

SIZE = 32
STROKES = 4
POINTS = 10  # per stroke; nine segments, so that a polyline of four corners keeps its corners
HARMONICS = 5


@dataclass
class Patterns:
    """What n pictures show, before a hand draws them."""

    points: Tensor  # [n, STROKES, POINTS, 2]
    active: Tensor  # bool [n, STROKES]
    blob: Tensor  # bool [n]: has a filled shape as well
    outline: Tensor  # [n, HARMONICS, 2], Fourier coefficients of the filled shape's radius
    grating: Tensor  # [n, 3], wave vector and strength of the stripes that fill the shape


def random_glyphs(n: int, gen: Generator) -> Tensor:
    """RGB in 0..1, [n, 3, SIZE, SIZE], each picture of its own."""
    if not n:
        return torch.zeros(0, 3, SIZE, SIZE)
    return render(random_patterns(n, gen), gen)


def uniform(gen: Generator, low: float, high: float, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=gen) * (high - low) + low


def chance(gen: Generator, probability: float, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=gen) < probability


def random_patterns(n: int, gen: Generator) -> Patterns:
    points = random_strokes(n, gen)
    count = torch.multinomial(torch.tensor([0.25, 0.35, 0.25, 0.15]), n, True, generator=gen) + 1
    active = torch.arange(STROKES) < count[:, None]
    decay = 0.35 / torch.arange(1, HARMONICS + 1).sqrt()
    return Patterns(
        points=fill_box(points, active),
        active=active,
        blob=chance(gen, 0.15, n),
        outline=torch.randn(n, HARMONICS, 2, generator=gen) * decay[:, None] * 0.5,
        grating=torch.cat([uniform(gen, -14, 14, n, 2), chance(gen, 0.5, n, 1).float()], dim=1),
    )


def random_strokes(n: int, gen: Generator) -> Tensor:
    """[n, STROKES, POINTS, 2]: Bézier curves, polylines, straight lines and elliptic arcs."""
    corners = uniform(gen, -1, 1, n, STROKES, 4, 2)
    is_joined = chance(gen, 0.5, n, STROKES)
    for s in range(1, STROKES):  # half of the strokes start where the one before ended
        corners[:, s, 0] = torch.where(is_joined[:, s, None], corners[:, s - 1, 3], corners[:, s, 0])
    t = torch.linspace(0, 1, POINTS)
    bezier = torch.stack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], dim=1)
    polyline = (1 - (3 * t[:, None] - torch.arange(4)).abs()).clamp(min=0)
    line = torch.stack([1 - t, 0 * t, 0 * t, t], dim=1)
    curves = torch.stack([bezier, polyline, line])[torch.randint(0, 3, (n, STROKES), generator=gen)]
    bezier_strokes = curves @ corners
    arcs = random_arcs(n, t, gen)
    return torch.where(chance(gen, 0.35, n, STROKES)[:, :, None, None], arcs, bezier_strokes)


def random_arcs(n: int, t: Tensor, gen: Generator) -> Tensor:
    shape = (n, STROKES, 1)
    span = torch.where(chance(gen, 0.35, *shape), torch.tensor(2 * math.pi), uniform(gen, 1.5, 5, *shape))
    angle = uniform(gen, 0, 2 * math.pi, *shape) + span * t
    circle = torch.stack([angle.cos(), angle.sin()], dim=-1)
    return uniform(gen, -0.5, 0.5, n, STROKES, 1, 2) + circle * uniform(gen, 0.25, 0.8, n, STROKES, 1, 2)


def fill_box(points: Tensor, active: Tensor) -> Tensor:
    """Centre the strokes in use and let the longer side of their box fill three quarters of the picture."""
    unused = ~active[:, :, None, None]
    lower = points.masked_fill(unused, math.inf).amin(dim=(1, 2), keepdim=True)
    upper = points.masked_fill(unused, -math.inf).amax(dim=(1, 2), keepdim=True)
    extent = (upper - lower).amax(dim=-1, keepdim=True).clamp(min=0.2)
    return (points - (lower + upper) / 2) * (1.5 / extent)


def render(patterns: Patterns, gen: Generator) -> Tensor:
    """The patterns as a hand draws them: RGB in 0..1, [n, 3, SIZE, SIZE]."""
    n = len(patterns.points)
    matrix, shift = random_affine(n, gen)
    points = wobble(patterns.points, gen).flatten(1, 2) @ matrix.transpose(1, 2) + shift[:, None]
    width = torch.exp(uniform(gen, math.log(0.05), math.log(0.17), n, 1))
    ink = draw_strokes(points.unflatten(1, (STROKES, POINTS)), patterns.active, width)
    ink = (ink - draw_blobs(patterns, matrix, shift)).abs()  # strokes across a filled shape are cut out
    return colour(degrade(ink.view(n, 1, SIZE, SIZE), gen), gen)


def pixel_grid() -> Tensor:
    """Pixel centres [SIZE², 2] as (x, y)."""
    axis = (torch.arange(SIZE) + 0.5) * (2 / SIZE) - 1
    return torch.cartesian_prod(axis, axis).flip(1)


def random_affine(n: int, gen: Generator) -> tuple[Tensor, Tensor]:
    angle, shear = torch.randn(n, generator=gen) * 0.15, torch.randn(n, generator=gen) * 0.2
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).view(n, 2, 2)
    stretch = torch.diag_embed(uniform(gen, 0.7, 1.15, n, 2))
    stretch[:, 0, 1] = shear
    return rotation @ stretch, uniform(gen, -0.12, 0.12, n, 2)


def wobble(points: Tensor, gen: Generator) -> Tensor:
    """A smooth random warp of the plane, and each stroke a little out of place."""
    n = len(points)
    waves = torch.randn(n, 1, 2, 3, generator=gen) * 2.5
    phase = uniform(gen, 0, 2 * math.pi, n, 1, 1, 3)
    amplitude = torch.randn(n, 1, 3, 2, generator=gen) * 0.06
    warp = torch.sin(points @ waves + phase) @ amplitude
    return points + warp + torch.randn(n, STROKES, 1, 2, generator=gen) * 0.05


def draw_strokes(points: Tensor, active: Tensor, width: Tensor) -> Tensor:
    """Ink [n, SIZE²] in 0..1 from each pixel's distance to the nearest segment."""
    start, along = points[:, :, :-1].flatten(1, 2), (points[:, :, 1:] - points[:, :, :-1]).flatten(1, 2)
    grid = pixel_grid()
    squared = along.square().sum(-1, keepdim=True).clamp(min=1e-6)  # [n, segments, 1]
    projection = (along @ grid.T - (along * start).sum(-1, keepdim=True)) / squared  # where the perpendicular falls
    nearest = projection.clamp(0, 1)
    to_start = grid.square().sum(-1) - 2 * start @ grid.T + start.square().sum(-1, keepdim=True)
    distance = to_start + squared * nearest * (nearest - 2 * projection)
    unused = ~active.repeat_interleave(POINTS - 1, dim=1)
    distance = distance.masked_fill_(unused[:, :, None], 9.0).amin(dim=1).clamp(min=0).sqrt()
    return ((width - distance) * (SIZE / 2) + 0.5).clamp(0, 1)


def draw_blobs(patterns: Patterns, matrix: Tensor, shift: Tensor) -> Tensor:
    """Ink [n, SIZE²] of the filled shapes; the pixels are taken back to the pattern's own frame."""
    ink = torch.zeros(len(shift), SIZE * SIZE)
    rows = patterns.blob.nonzero().squeeze(1)
    if not len(rows):
        return ink
    grid = (pixel_grid() - shift[rows, None]) @ torch.linalg.inv(matrix[rows]).transpose(1, 2)
    angle = torch.atan2(grid[..., 1], grid[..., 0]).unsqueeze(-1) * torch.arange(1, HARMONICS + 1)
    outline = patterns.outline[rows]
    swing = torch.cos(angle) @ outline[:, :, :1] + torch.sin(angle) @ outline[:, :, 1:]
    radius = 0.6 * torch.exp(swing.squeeze(-1))
    shape = ((radius - grid.norm(dim=-1)) * (SIZE / 2) + 0.5).clamp(0, 1)
    grating = patterns.grating[rows]
    stripes = torch.sin(grid @ grating[:, :2, None]).squeeze(-1)
    ink[rows] = shape * (1 - grating[:, 2:] * (0.5 + 0.5 * stripes))
    return ink


def degrade(ink: Tensor, gen: Generator) -> Tensor:
    """A third of the pictures as if scanned at 8 x 8 pixels, a sixth at 16 x 16; all of them with some noise."""
    n = len(ink)
    order = torch.randperm(n, generator=gen)
    for rows, side in ((order[: n // 3], 8), (order[n // 3 : n // 2], 16)):
        scanned = F.avg_pool2d(ink[rows], SIZE // side)
        ink[rows] = F.interpolate(scanned, size=SIZE, mode="bicubic").clamp(0, 1)
    gamma = torch.exp(torch.randn(n, 1, 1, 1, generator=gen) * 0.3)
    noise = torch.randn(ink.shape, generator=gen) * uniform(gen, 0, 0.06, n, 1, 1, 1)
    return (ink.clamp(min=1e-6) ** gamma + noise).clamp(0, 1)


def colour(ink: Tensor, gen: Generator) -> Tensor:
    """Ink on paper: half of the pictures white on black, the others of any two shades that differ enough."""
    n = len(ink)
    tint = uniform(gen, -0.25, 0.25, n, 3, 1, 1) * chance(gen, 0.5, n, 1, 1, 1)
    dark, bright = uniform(gen, 0, 0.4, n, 1, 1, 1) + tint, uniform(gen, 0.6, 1, n, 1, 1, 1) - tint
    swap = chance(gen, 0.5, n, 1, 1, 1)
    paper, pen = torch.where(swap, bright, dark), torch.where(swap, dark, bright)
    shaded = (paper + (pen - paper) * ink).clamp(0, 1)
    return torch.where(chance(gen, 0.5, n, 1, 1, 1), ink, shaded)
