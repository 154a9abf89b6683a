#include "lockstep/tool/cli.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <new>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/launch/error_file.h"
#include "lockstep/launch/variables.h"

namespace lockstep::tool {
namespace cli_test {

using Words = std::vector<std::string>;

/// A command with one option of each kind.
struct Command {
  Command() {
    cli.option("--max-epochs", epochs, "How often", {1, 1000});
    cli.option("--lr", rate, "Rate", {0, 10});
    cli.seed("-s,--seed", seed, "Seed");
    cli.option("--clip", clip, "Clipping", {0, 1e9});
    cli.option("--data-dir", folder, "Where", "DIR");
    cli.option("--names", names, "Words", "NAME,...");
    cli.choice("--model", model, {"mlp", "convnet", "linear"}, "Which");
    cli.flag("-q,--quiet", quiet, "Say little");
    cli.also_called("--lr", {"--learning-rate"});
    cli.list("--sizes", sizes, "Bytes", {1, 1e9});
    cli.list("--backend", backends, "Which");
    cli.example("lockstep test --lr 0.1", "with another rate");
  }
  bool parse(const Words& words) { return cli.parse(words); }
  std::string refusal(const Words& words) {
    try {
      (void)cli.parse(words);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "nothing was thrown";
  }

  int epochs = 3;
  double rate = 0.01;
  uint64_t seed = 0;
  std::optional<double> clip;
  std::string folder;
  std::string names;
  std::string model = "mlp";
  bool quiet = false;
  std::vector<int64_t> sizes = {4, 1024};
  std::vector<std::string> backends;
  Cli cli{"lockstep test", "Tests."};
};

TEST(Cli, WithoutFlagsTheDefaultsStay) {
  Command command;
  EXPECT_TRUE(command.parse({}));
  EXPECT_EQ(command.epochs, 3);
  EXPECT_FALSE(command.clip);
  EXPECT_FALSE(command.cli.given("--lr"));
}

TEST(Cli, ValuesLandInTheirVariables) {
  Command command;
  EXPECT_TRUE(
      command.parse({"--max-epochs", "7", "--lr=1e-3", "-s5", "--clip", "0.5", "--data-dir", "a b",
                     "--model", "linear", "-q", "--sizes", "1,2,3", "--backend", "gloo,shm"}));
  EXPECT_EQ(command.epochs, 7);
  EXPECT_EQ(command.rate, 1e-3);
  EXPECT_EQ(command.seed, 5u);
  EXPECT_EQ(command.clip, 0.5);
  EXPECT_EQ(command.folder, "a b");
  EXPECT_EQ(command.model, "linear");
  EXPECT_TRUE(command.quiet);
  EXPECT_EQ(command.sizes, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(command.backends, (Words{"gloo", "shm"}));
  EXPECT_TRUE(command.cli.given("--seed"));
  EXPECT_TRUE(command.cli.given("-s"));
}

TEST(Cli, UnderscoresAreDashesInNamesOnly) {
  Command command;
  EXPECT_TRUE(command.parse({"--max_epochs=9", "--data_dir", "my_data", "--data-dir=x_y"}));
  EXPECT_EQ(command.epochs, 9);
  EXPECT_EQ(command.folder, "x_y");
}

TEST(Cli, ValuesAreTakenAsTheyAre) {
  Command command;
  EXPECT_TRUE(command.parse({"--data-dir", "--a_b"}));
  EXPECT_EQ(command.folder, "--a_b");
}

TEST(Cli, SeedsAreThoseOfManualSeed) {
  Command command;
  EXPECT_TRUE(command.parse({"--seed", "-1"}));
  EXPECT_EQ(command.seed, 18446744073709551615u);
  EXPECT_TRUE(command.parse({"--seed", "18446744073709551614"}));
  EXPECT_EQ(command.seed, 18446744073709551614u);
}

TEST(Cli, OfAFlagGivenTwiceTheLastOneCounts) {
  Command command;
  EXPECT_TRUE(command.parse({"--lr", "1", "--lr", "2"}));
  EXPECT_EQ(command.rate, 2);
}

TEST(Cli, OfAListGivenTwiceBothCount) {
  Command command;
  EXPECT_TRUE(command.parse({"--sizes", "1,2", "--sizes=3", "--backend", "shm", "--names", "a",
                             "--backend=gloo", "--names", "b"}));
  EXPECT_EQ(command.sizes, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(command.backends, (Words{"shm", "gloo"}));
  EXPECT_EQ(command.names, "a,b");
}

TEST(Cli, AListReplacesThatOfAConfiguration) {
  Command command;
  command.cli.configure("--names", "a,b", "");
  EXPECT_TRUE(command.parse({"--names", "c"}));
  EXPECT_EQ(command.names, "c");
}

TEST(Cli, AnUnknownFlagGetsTheNearest) {
  Command command;
  const auto text = command.refusal({"--max-epoch", "3"});
  EXPECT_NE(text.find("unknown flag '--max-epoch'; did you mean '--max-epochs'?"),
            std::string::npos)
      << text;
  for (const auto& [flag, meant] :
       std::vector<std::pair<std::string, std::string>>{{"--max", "'--max-epochs'"},
                                                        {"--epochs", "'--max-epochs'"},
                                                        {"--max_epo=3", "'--max-epochs'"},
                                                        {"-lr", "'--lr'"},
                                                        {"--learning_rate=1", "'--lr'"},
                                                        {"--ba", "'--backend'"}}) {
    EXPECT_NE(command.refusal({flag, "3"}).find("; did you mean " + meant + "?"), std::string::npos)
        << command.refusal({flag, "3"});
  }
  EXPECT_EQ(command.refusal({"-qx"}).find("did you mean"), std::string::npos);
  EXPECT_EQ(command.refusal({"--zzzzzzzz"}).find("did you mean"), std::string::npos);
  EXPECT_NE(command.refusal({"-x"}).find("'-x'"), std::string::npos);
}

TEST(Cli, AnUnknownChoiceGetsTheNearest) {
  Command command;
  const auto text = command.refusal({"--model", "covnet"});
  EXPECT_NE(text.find("did you mean 'convnet'?"), std::string::npos) << text;
  EXPECT_NE(text.find("mlp, convnet, linear"), std::string::npos) << text;
}

TEST(Cli, BadValuesAreNamedWithWhatWasExpected) {
  Command command;
  for (const auto& [words, says] : std::vector<std::pair<Words, std::string>>{
           {{"--max-epochs", "0"}, "--max-epochs: '0' is not a whole number from 1 to 1000"},
           {{"--max-epochs", "three"}, "'three' is not a whole number"},
           {{"--max-epochs", "1.5"}, "'1.5' is not a whole number"},
           {{"--max-epochs", "99999999999999999999"}, "is not a whole number"},
           {{"--lr", "fast"}, "--lr: 'fast' is not a number from 0 to 10"},
           {{"--lr", "-1"}, "--lr: '-1' is not a number"},
           {{"--lr", "nan"}, "--lr: 'nan'"},
           {{"--seed", "1.5"}, "--seed: '1.5' is not a whole number from -2^63 to 2^64 - 1"},
           {{"--seed", "18446744073709551616"}, "--seed: '18446744073709551616' is not"},
           {{"--lr=", "--model", "mlp"}, "--lr= needs a value"},
           {{"--lr", "-q"}, "--lr needs a value"},
           {{"--sizes", "4,,5"}, "--sizes: ''"},
           {{"--backend", "a,,b"}, "--backend: 'a,,b'"},
           {{"--lr"}, "--lr needs a value"},
           {{"--data-dir", "--lr", "3"}, "--data-dir needs a value"},
           {{"extra"}, "unexpected argument 'extra'"},
       }) {
    const auto text = command.refusal(words);
    EXPECT_NE(text.find(says), std::string::npos) << join(words, " ") << ": " << text;
  }
}

TEST(Cli, PositionalsAreTakenInOrderAndMissed) {
  std::string first;
  std::string second = "none";
  Cli cli("lockstep test", "Tests.");
  cli.positional("WEIGHTS", first, "a file");
  cli.positional("MORE", second, "another", false);
  EXPECT_TRUE(cli.parse({"a.safetensors"}));
  EXPECT_EQ(first, "a.safetensors");
  EXPECT_EQ(second, "none");
  Cli missing("lockstep test", "Tests.");
  missing.positional("WEIGHTS", first, "a file");
  EXPECT_THROW((void)missing.parse({}), UsageError);
  int epochs = 0;
  Cli number("lockstep test", "Tests.");
  number.positional("EPOCHS", epochs, "how often", {1});
  EXPECT_TRUE(number.parse({"3"}));
  EXPECT_EQ(epochs, 3);
  EXPECT_THROW((void)number.parse({"0"}), UsageError);
}

TEST(Cli, WhatTrailsIsUntouched) {
  std::vector<std::string> rest;
  int count = 1;
  bool flag = false;
  Cli cli("lockstep test", "Tests.");
  cli.option("--count", count, "N");
  cli.flag("-m,--module", flag, "M");
  cli.trailing("PROGRAM", rest, "what runs");
  EXPECT_TRUE(cli.parse({"--count", "2", "-m", "prog", "--count", "3", "--", "--a_b", ""}));
  EXPECT_EQ(count, 2);
  EXPECT_TRUE(flag);
  EXPECT_EQ(rest, (Words{"prog", "--count", "3", "--", "--a_b", ""}));
  EXPECT_TRUE(cli.parse({"--", "--odd-name"}));
  EXPECT_EQ(rest, (Words{"--odd-name"}));
}

TEST(Cli, CustomOptionsSeeEachOccurrence) {
  Words seen;
  Cli cli("lockstep test", "Tests.");
  cli.custom("--set", "KEY=VALUE", "Sets", "",
             [&](const std::string& text) { seen.push_back(text); });
  EXPECT_TRUE(cli.parse({"--set", "a=1", "--set=b=2"}));
  EXPECT_EQ(seen, (Words{"a=1", "b=2"}));
}

TEST(Cli, HelpNamesEverythingWithinItsWidth) {
  Command command;
  for (const int width : {40, 50, 69, 70, 80, 100}) {
    const auto text = command.cli.help(width);
    for (const char* part : {"--max-epochs N", "[3]", "-q, --quiet", "mlp|convnet|linear",
                             "[4,1024]", "Examples:", "lockstep test --lr 0.1"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part;
    }
    for (const auto& line : split(text, '\n')) {
      EXPECT_LE(line.size(), static_cast<size_t>(width)) << line;
    }
  }
}

TEST(Cli, HelpOfOneSection) {
  for (const std::string word : {"output", "Out", "outptu"}) {
    bool quiet = false, loud = false;
    Cli cli("lockstep test", "Tests.");
    cli.group("Input");
    cli.flag("--loud", loud, "L");
    cli.group("Output");
    cli.flag("--quiet", quiet, "Q");
    testing::internal::CaptureStdout();
    if (word == "outptu") {
      EXPECT_THROW((void)cli.parse({"--help", word}), UsageError);
    } else {
      EXPECT_FALSE(cli.parse({"--help", word}));
    }
    std::fflush(stdout);
    const std::string text = testing::internal::GetCapturedStdout();
    EXPECT_EQ(text.find("--quiet") == std::string::npos, word == "outptu");
    EXPECT_EQ(text.find("--loud"), std::string::npos) << text;
  }
}

TEST(Cli, CommonFlagsInALineEachAndAllOfThemWhenAskedFor) {
  for (const std::string words :
       {"--help", "--help out", "--help-all", "--man-page=1.2,2026-12-31"}) {
    std::string value = "a";
    bool loud = false;
    Cli cli("lockstep test", "Tests.");
    cli.group("In and out");
    cli.choice("--value", value, {"a", "bb", "a-long-choice"}, "Long text of value");
    cli.flag("--loud", loud, "Long text of loud");
    cli.common("--value", "Short text");
    testing::internal::CaptureStdout();
    EXPECT_FALSE(cli.parse(split(words, ' ')));
    std::fflush(stdout);
    const std::string text = testing::internal::GetCapturedStdout();
    const bool is_short = words == "--help";
    EXPECT_EQ(text.find("--value NAME            Short text [a]\n") != std::string::npos, is_short);
    EXPECT_EQ(text.find("Long text of loud") == std::string::npos, is_short) << text;
    EXPECT_EQ(text.find("'lockstep test --help SECTION'") != std::string::npos, is_short);
    EXPECT_EQ(text.starts_with(".TH LOCKSTEP-TEST 1 2026-12-31 \"lockstep 1.2\""),
              words.size() > 15);
  }
}

TEST(ManPage, HasNoRequestsAndEscapesOfTheHelp) {
  Cli cli("lockstep test", ".a 'b --c\\n`~^");
  testing::internal::CaptureStdout();
  EXPECT_FALSE(cli.parse({"--man-page=1.2,2026-12-31"}));
  std::fflush(stdout);
  EXPECT_NE(
      testing::internal::GetCapturedStdout().find("\n\\&.a \\(aqb \\-\\-c\\en\\(ga\\(ti\\(ha\n"),
      std::string::npos);
}

TEST(Cli, DefaultsStandInTheEnvironment) {
  ::setenv("CLI_TEST_MAX_EPOCHS", "7", 1);
  ::setenv("CLI_TEST_LR", "2", 1);
  ::setenv("CLI_TEST_QUIET", "0", 1);
  Command command;
  command.cli.defaults_from_environment("CLI_TEST_");
  EXPECT_TRUE(command.parse({"--lr", "3"}));
  EXPECT_EQ(command.epochs, 7);
  EXPECT_EQ(command.rate, 3);
  EXPECT_FALSE(command.quiet);
  EXPECT_TRUE(command.cli.given("--max-epochs"));
  ::setenv("CLI_TEST_LR", "x", 1);
  try {
    command.cli.defaults_from_environment("CLI_TEST_");
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_TRUE(std::string(error.what())
                    .starts_with("environment variable CLI_TEST_LR, the default of --lr: 'x'"))
        << error.what();
  }
  for (const char* name : {"CLI_TEST_MAX_EPOCHS", "CLI_TEST_LR", "CLI_TEST_QUIET"})
    ::unsetenv(name);
}

TEST(RunGuarded, ExitCodesAreThoseOfTheErrors) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(run_guarded("lockstep x", [] { return 0; }), 0);
  EXPECT_EQ(run_guarded("lockstep x", []() -> int { throw UsageError("bad"); }), 2);
  EXPECT_EQ(run_guarded("lockstep x", []() -> int { throw DataError("worse"); }), 1);
  EXPECT_EQ(run_guarded("lockstep x", []() -> int { throw InterruptedError(15); }), 143);
  EXPECT_EQ(run_guarded("lockstep x", []() -> int { throw std::runtime_error("std"); }), 1);
  EXPECT_EQ(run_guarded("lockstep x", []() -> int { throw 3; }), 1);
  const auto text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("lockstep x: error: bad\n"), std::string::npos);
  EXPECT_NE(text.find("lockstep x: stopped by SIGTERM\n"), std::string::npos);
}

TEST(RunGuarded, WantOfMemoryIsNamed) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(run_guarded("lockstep x", []() -> int { throw std::bad_alloc(); }), 1);
  EXPECT_EQ(testing::internal::GetCapturedStderr().find("lockstep x: error: out of memory\n  hint"),
            0u);
}

TEST(RunGuarded, ASpawnedWorkerLeavesTheWordToItsParent) {
  const TemporaryDirectory folder;
  const auto file = folder.path() / "error.json";
  setenv(launch::kErrorFileVariable, file.c_str(), 1);
  setenv(launch::kSpawnVariable, "1", 1);
  testing::internal::CaptureStderr();
  EXPECT_EQ(run_guarded("lockstep x", []() -> int { throw DataError("gone"); }), 1);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  unsetenv(launch::kErrorFileVariable);
  unsetenv(launch::kSpawnVariable);
  ASSERT_TRUE(launch::read_error_file(file));
  EXPECT_EQ(launch::read_error_file(file)->message, "gone");
}

}  // namespace cli_test
}  // namespace lockstep::tool
