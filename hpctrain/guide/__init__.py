"""The user guide: Markdown files beside these modules, and pages that are generated from the code."""
