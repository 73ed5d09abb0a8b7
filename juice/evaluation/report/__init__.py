"""The report of an evaluation, made from its results alone.

It is `report.md` with its pictures in `figures`, and `report.html` in one file.

published        the paper's numbers, if the model is one of its six
figures          a picture for each analysis
parts            sections, tables, pictures, and how numbers look
verdicts         which method is best, and whether by more than chance
method_sections  what the methods did toward one target
seeds            what they did over several seeds
items            single answers
sections         all sections, in order
render           Markdown and HTML
"""

from juice.evaluation.report.render import require_extra, write_report

__all__ = ["require_extra", "write_report"]
