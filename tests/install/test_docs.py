"""The pages: links lead somewhere, code compiles, Doxygen has no warning, pictures are those of their scripts."""

import json
import pathlib
import re
import shlex
import shutil
import sys
import unittest

import lockstep_testing as t

sys.path.insert(0, str(t.SOURCE_DIR / "scripts"))
import doxygen_markdown as markdown  # noqa: E402
import pictures  # noqa: E402

PAGES = [*t.SOURCE_DIR.glob("*.md"), *(t.SOURCE_DIR / "docs").rglob("*.md"), t.SOURCE_DIR / "examples/README.md"]
# What fragments of a page take as given, in a namespace of the page.
CONTEXT = {
    "README.md": "lockstep::DataLoader train = made<lockstep::DataLoader>(), validation = made<lockstep::DataLoader>();",
    "program.md": "lockstep::DataLoader train = made<lockstep::DataLoader>(), validation = made<lockstep::DataLoader>();",
    "comm.md": "std::string host; uint16_t port; bool done; std::pair<int, int> members_of(int64_t);"
               "bool train(torch::nn::Module&, lockstep::World&);",
    "elastic.md": "lockstep::TrainerOptions options; struct Module : lockstep::TrainingModule<lockstep::Batch> {"
                  "at::Tensor training_step(const lockstep::Batch&, int64_t) override;"
                  "std::vector<lockstep::OptimizerConfig> configure_optimizers() override; };"
                  "std::shared_ptr<Module> module;"
                  "lockstep::DataLoader train = made<lockstep::DataLoader>(), validation = made<lockstep::DataLoader>();",
    "parallel.md": "lockstep::DataLoader loader = made<lockstep::DataLoader>(); int64_t epoch; at::Tensor x, y;"
                   "at::Tensor loss_of(at::Tensor, at::Tensor); at::Tensor criterion(at::Tensor, at::Tensor);"
                   "struct Net : torch::nn::Module {};",
    "porting.md": "at::Tensor output, x, y;",
    "logging.md": "int64_t step; double loss, rate; struct Net : torch::nn::Module { torch::nn::Linear layer{1, 1}; };"
                  "std::shared_ptr<Net> model;",
    "mpi.md": "void* comm;",
    "rpc.md": "std::string address;",
}
PREAMBLE = """#include <torch/torch.h>
#include <tuple>
#include "lockstep/lockstep.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"
#include "lockstep/rpc/rpc.h"
template <class T> T made();
lockstep::World& world = made<lockstep::World&>();
torch::nn::Sequential model;
namespace rpc = lockstep::rpc;
using torch::nn::functional::cross_entropy;
"""


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


def as_function(code, number):
    """A fragment as the body of a function, unless it defines one."""
    if re.search(r"^\w[^;=]*\) \{ return", code, re.M):
        return code
    return f"void fragment_{number}() {{ while (true) {{\n{code}\n}} }}"


class Docs(unittest.TestCase):
    def test_links_lead_somewhere(self):
        anchors = {page: markdown.anchors_of(page.read_text()) for page in PAGES}
        broken, count = [], 0
        for page in PAGES:
            for target, anchor in markdown.links_of(page.read_text()):
                other = (page.parent / target).resolve() if target else page
                count += 1
                if not other.exists() or (anchor and anchor not in anchors.get(other, ())):
                    broken.append(f"{page.relative_to(t.SOURCE_DIR)}: {target}#{anchor}")
        self.assertGreater(count, 60)
        self.assertEqual(broken, [])

    def test_a_broken_link_is_found(self):
        text = "# A b\n[x](none.md#c), [y](https://example.org)\n```\n[z](w.md)\n```\n## `A-b` and [c](d.md), more\n"
        self.assertEqual(list(markdown.links_of(text)), [("none.md", "c"), ("d.md", "")])
        self.assertEqual(markdown.anchors_of(text), ["a-b", "a-b-and-c-more"])

    def test_cpp_compiles(self):
        """All whole programs and fragments at once, as LibTorch's headers cost most of the time."""
        commands = json.loads((t.BUILD_DIR / "compile_commands.json").read_text())
        command = [entry for entry in commands if entry["file"].endswith("examples/quickstart/rpc.cpp")]
        if not command:
            self.skipTest("the examples are not built, so it is not known how programs are compiled")
        includes, spaces, count = [], [], 0
        for page in PAGES:
            parts = []
            if page.name == "tutorial.md":
                continue  # It shows lines of programs, as e2e.examples checks.
            for code in blocks(page, "cpp"):
                count += 1
                includes += re.findall(r"^#include .*$", code, re.M)
                code = re.sub(r"^#include .*$", "", code, flags=re.M)
                code = code.replace("for (...)", "for (int i = 0; i < 3; ++i)").replace("...", "")
                if "int main(" in code:
                    parts.append(f"namespace program_{count} {{ {code.replace('int main(', 'int main_of_it(')} }}")
                else:
                    parts.append(f"namespace part_{count} {{ {as_function(code, count)} }}")
            if parts:
                spaces.append(f"namespace page_{len(spaces)} {{\n{CONTEXT.get(page.name, '')}\n" + "\n".join(parts) + "\n}")
        self.assertGreater(count, 10)
        words = shlex.split(command[0]["command"])
        flags = [word for word in words[1:words.index("-o")] if not word.startswith(("-Winvalid-pch", "-M"))]
        with t.temporary_folder() as folder:
            source = pathlib.Path(folder) / "pages.cpp"
            source.write_text("\n".join([*includes, PREAMBLE, *spaces]))
            done = t.run(words[0], *flags, "-w", "-fsyntax-only", source, cwd=command[0]["directory"], timeout=300, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_shell_blocks_are_shell(self):
        for page in PAGES:
            for code in blocks(page, "sh"):
                done = t.run("bash", "-n", "-c", code, check=False)
                self.assertEqual(done.returncode, 0, f"{page.name}: {code}\n{done.stderr}")

    def test_flags_of_lockstep_exist(self):
        known = {}
        for page in PAGES:
            for code in blocks(page, "sh"):
                for command in re.findall(r"\blockstep (train|eval) ([^#|\n]*)", code.replace("\\\n", " ")):
                    name, words = command
                    if name not in known:
                        table = t.run(t.LOCKSTEP, name, "--flag-table").stdout
                        known[name] = set(re.findall(r"--[a-z-]+", "\n".join(row.split("\t")[0] for row in table.split("\n"))))
                    flags = set(re.findall(r"(?<= )--[a-z][a-z-]*", " " + words))
                    self.assertLessEqual(flags, known[name], page.name)

    @unittest.skipUnless(shutil.which("doxygen"), "doxygen is not installed: scripts/setup.sh --docs")
    def test_the_site_has_no_warnings(self):
        with t.temporary_folder() as folder:
            done = t.run(t.SOURCE_DIR / "scripts/docs.sh", folder, check=False, timeout=200)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            html = pathlib.Path(folder) / "html"
            found = "".join(path.read_text() for path in (html / "search").glob("*.js"))
            for word in ("DistributedSampler", "The command line"):
                self.assertTrue(word in found, f"the search does not know {word}")

    def test_pictures_are_drawn_by_their_script(self):
        with t.temporary_folder() as folder:
            pictures.draw(pathlib.Path(folder))
            for name in ("run.svg", "speed.svg"):
                drawn = (pathlib.Path(folder) / name).read_text()
                self.assertEqual(drawn, (pictures.IMAGES / name).read_text(), f"run scripts/pictures.py draw: {name}")
        targets = json.loads((pictures.IMAGES / "targets.json").read_text())
        self.assertIn(pictures.table(targets), (t.SOURCE_DIR / "README.md").read_text())
        measured = json.loads((t.SOURCE_DIR / "bench/targets.json").read_text())
        for rows in (targets["results"], measured):
            names = {row["target"] for row in rows}
            self.assertLessEqual({name for figures in pictures.SHOWN.values() for name in figures}, names)


if __name__ == "__main__":
    t.main()
