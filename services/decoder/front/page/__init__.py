"""The status page's files: plain HTML, style and script, served as they are by routes/page.py."""
