"""The report of an evaluation, from its results alone: `report.md` with pictures beside it, and `report.html` in one file.

published   the paper's numbers, where the model is one of its six
figures     a picture for each analysis
sections    titles, sentences, tables and pictures, in order
render      Markdown and HTML
"""

from juice.evaluation.report.render import write_report

__all__ = ["write_report"]
