"""What `tools/rooms.py` counts."""

from tools import rooms

FILES = {
    "__init__.py": "from house.version import NUMBER as NUMBER\n",
    "version.py": "NUMBER = 1\n",
    "run.py": "from house.cli.run import main\n",
    "cli/__init__.py": "",
    "cli/run.py": "from house import work\n\n\ndef main():\n    import house.work.a\n",
    "work/__init__.py": "",
    "work/a.py": "from house.work.below import b\nfrom house.work.below.b import f\n",
    "work/below/__init__.py": "",
    "work/below/b.py": "def f():\n    from house.work import a\n",
}


def test_rooms_arrows_and_circles(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(rooms.report(tmp_path / "house")) == [
        "cli: work (2)",
        "version",
        "work",
        "3 rooms, 1 arrows",
        "0 circles of rooms",
        "1 circles of folders",
        "  work <-> work/below",
        "1 circles of files",
        "  work/a.py <-> work/below/b.py",
    ]


def test_rooms_of_the_package_are_no_circle():
    lines = list(rooms.report(rooms.PACKAGE))
    assert "0 circles of rooms" in lines
    assert "0 circles of folders" in lines
    assert "0 circles of files" in lines
