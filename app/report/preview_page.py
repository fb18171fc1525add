"""Write a preview as one HTML page that needs nothing else: no script, no font, no network.

All text is escaped, and the page forbids itself everything but its own style.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from app.report.preview import DatasetView, PackView, Preview, RowView, count
from app.report.token_text import Passage, Piece

NUM_HUES = 6
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #60646c; --line: #d9d9e0;
  --paper: #fcfcfd; --learned: #b9ecc4; --special: #0b68cb; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --dim: #b0b4ba; --line: #43484e;
  --paper: #18191b; --learned: #1d5b36; --special: #70b8ff; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 0 auto; padding: 1rem 1.5rem 4rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem;
  border-bottom: 1px solid var(--line); } h3 { font-size: 1rem; margin-bottom: .3rem; }
p, ul { margin: .4rem 0; } .dim, figcaption { color: var(--dim); }
pre { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; margin: .4rem 0 1rem; }
pre i { font-style: normal; border-right: 1px solid var(--line); }
pre i.l { background: var(--learned); text-decoration: underline; text-underline-offset: 4px; }
pre i.p { text-decoration-style: dashed; } pre i.s { color: var(--special); font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
.pack { display: flex; border: 1px solid var(--line); height: 2.2rem; font-size: 11px;
  background: repeating-linear-gradient(45deg, transparent 0 6px, var(--line) 6px 7px); }
.pack span { overflow: hidden; white-space: nowrap; padding-left: 2px; box-sizing: border-box;
  border-right: 1px solid var(--paper); color: #fff; }
.h0 { background: #3358d4; } .h1 { background: #a144af; } .h2 { background: #96691d; }
.pack .alt { filter: brightness(.72); }
.h3 { background: #2a7e4f; } .h4 { background: #107d98; } .h5 { background: #c33a4b; }
svg { display: block; width: 100%; height: 6rem; } svg rect { fill: var(--special); }
.warning { color: #ad5700; } .problem { color: #ce2c31; font-weight: 600; }
@media (prefers-color-scheme: dark) { .warning { color: #ffa057; } .problem { color: #ff9592; } }
"""
LEGEND = (
    '<pre><i class="l">learned</i><i class="l p">learned with a weight of its own</i>'
    '<i>only seen</i><i class="s">special token</i></pre>'
    '<p class="dim">A thin line ends each token; its id and weight show when it is pointed at.</p>'
)


def preview_page(preview: Preview) -> str:
    """Return the page of a preview."""
    body = "\n".join(
        [
            f"<h1>{_text(preview.title)}</h1>",
            _list(preview.facts),
            _contents(preview),
            LEGEND,
            *(_dataset(dataset, index) for index, dataset in enumerate(preview.datasets)),
            '<h2 id="packs">Packs</h2>',
            '<p class="dim">What the first steps hold: documents of a pack cannot see each other; '
            "hatched is padding. A document says its tokens, and where it comes from when "
            "pointed at.</p>",
            *(_pack(pack, preview.names) for pack in preview.packs),
            '<h2 id="lengths">Lengths</h2>',
            *(_histogram(dataset, preview.longest) for dataset in preview.datasets),
            '<h2 id="mixture">Mixture</h2>',
            f'<p class="dim">Over {_text(preview.mixture_of)}.</p>',
            _table(preview.mixture),
            '<h2 id="audit">Audit</h2>',
            _audit(preview),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # An escape that was forgotten could still load and run nothing.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(preview.title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>"


def _contents(preview: Preview) -> str:
    links = [
        f'<a href="#data-{index}">{_text(name)}</a>' for index, name in enumerate(preview.names)
    ]
    links += [f'<a href="#{n}">{n}</a>' for n in ("packs", "lengths", "mixture", "audit")]
    return f"<nav>{' &middot; '.join(links)}</nav>"


def _dataset(dataset: DatasetView, index: int) -> str:
    rows = "\n".join(_row(row) for row in dataset.rows)
    return (
        f'<h2 id="data-{index}">{_text(dataset.name)}</h2>\n'
        f'<p class="dim">{_text(dataset.about)}</p>\n{rows}'
    )


def _row(row: RowView) -> str:
    heading = f"{row.origin}: {row.num_tokens:,} tokens, {row.num_learned:,} learned"
    parts = [f"<h3>{_text(heading)}</h3>", _passage(row.tokens)]
    if row.targets is not None:
        parts += ['<p class="dim">to be said by the decoder:</p>', _passage(row.targets)]
    return "\n".join(parts)


def _passage(passage: Passage) -> str:
    gap = ""
    if passage.left_out:
        gap = f'\n<span class="dim">[... {passage.left_out:,} tokens left out ...]</span>\n'
    head, tail = ("".join(map(_piece, part)) for part in (passage.head, passage.tail))
    return f"<pre>{head}{gap}{tail}</pre>"


def _piece(piece: Piece) -> str:
    kinds = [
        *(["l"] if piece.is_learned else []),
        *(["p"] if piece.is_learned and piece.weight != 1 else []),
        *(["s"] if piece.is_special else []),
    ]
    ids = " ".join(map(str, piece.ids))
    shown = _text(piece.text).replace("\n", "&crarr;\n") or "&empty;"
    of_kind = f' class="{" ".join(kinds)}"' if kinds else ""
    return f'<i{of_kind} title="id {ids}, weight {piece.weight:g}">{shown}</i>'


def _pack(pack: PackView, names: Sequence[str]) -> str:
    documents = "".join(
        f'<span class="h{document.dataset % NUM_HUES}{" alt" * is_darker}" '
        f'style="width:{100 * document.tokens / pack.capacity:.3f}%" '
        f'title="{_text(names[document.dataset])}, {_text(document.origin)}: '
        f'{document.tokens:,} tokens, {document.learned:,} learned">'
        f"{_text(names[document.dataset])} {document.tokens:,}</span>"
        for document, is_darker in zip(pack.documents, pack.shades, strict=True)
    )
    return (
        f"<h3>step {pack.step}, pack {pack.number}: {count(len(pack.documents), 'document')}, "
        f"{pack.tokens:,} of {pack.capacity:,} tokens "
        f'({pack.tokens / pack.capacity:.1%} full)</h3>\n<div class="pack">{documents}</div>'
    )


def _histogram(dataset: DatasetView, longest: int) -> str:
    most, bins = max(dataset.counts), len(dataset.counts)
    bars = "".join(
        f'<rect x="{index}" y="{100 - 100 * count / most:.2f}" width="0.9" '
        f'height="{100 * count / most:.2f}"><title>{index * longest // bins:,} to '
        f"{(index + 1) * longest // bins:,} tokens: {count:,} documents</title></rect>"
        for index, count in enumerate(dataset.counts)
    )
    caption = (
        f"{dataset.name}: median {dataset.median:,} tokens, 95 % up to "
        f"{dataset.percentile_95:,}, longest {dataset.longest:,}; axis from 0 to {longest:,}"
    )
    return (
        f'<figure><svg viewBox="0 0 {bins} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{_text(caption)}">{bars}</svg>'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _audit(preview: Preview) -> str:
    lines = []
    for line in preview.audit.notes():
        kind = line.partition(":")[0]
        of_kind = f' class="{kind}"' if kind in ("warning", "problem") else ""
        lines.append(f"<li{of_kind}>{_text(line)}</li>")
    return f"{_table(preview.audit.cells())}\n<ul>{''.join(lines)}</ul>"


def _table(cells: Sequence[Sequence[str]]) -> str:
    """Lay out headings and rows."""
    headings, *rows = cells
    head = "".join(f"<th>{_text(cell)}</th>" for cell in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
