from tests.sample.browser import NO_BROWSER


def pytest_terminal_summary(terminalreporter):
    """A page that no browser opened must not be one s among many."""
    reasons = {str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", [])}
    for reason in sorted(reason for reason in reasons if NO_BROWSER in reason):
        terminalreporter.write_line(reason, red=True, bold=True)
