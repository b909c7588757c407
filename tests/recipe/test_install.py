"""The command that installs an extra, where the package comes from a clone and where it does not."""

from rloo_cli.recipe.install import ROOT, install_command


def test_a_clone_installs_itself_and_a_wheel_the_package(tmp_path):
    assert install_command("math") == f'pip install -e "{ROOT}[math]"'
    assert (ROOT / "rloo_cli" / "recipe" / "install.py").is_file()
    assert install_command("math", tmp_path) == 'pip install "rloo[math]"'
