"""Parts of the run report: run directories, HTML elements, charts, sections, style and script."""
