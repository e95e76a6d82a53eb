"""What somebody may put into a checkpoint: pickles that run code, and links to other places."""

import os


class RunsCode:
    """Makes a folder when a pickle of it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def link_another_file(checkpoint):
    """A file that no manifest lists."""
    checkpoint.with_name("elsewhere.json").write_text("{}")
    (checkpoint / "notes.json").symlink_to(checkpoint.with_name("elsewhere.json"))


def link_a_folder(checkpoint):
    """A folder that no manifest lists."""
    checkpoint.with_name("elsewhere").mkdir()
    (checkpoint / "global_step4").symlink_to(checkpoint.with_name("elsewhere"))
