#include "lockstep/base/words.h"

#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace words_test {

using Words = std::vector<std::string>;

const Words kFlags = {"-t",        "--tee",        "--nproc-per-node", "--node-rank",
                      "--nnodes",  "--max-epochs", "--batch-size",     "--lr",
                      "--log-dir", "--data-dir",   "--load-weights",   "--log-every-n-steps"};

TEST(Words, APrefixMeansTheWordsThatItBegins) {
  EXPECT_EQ(similar_words("--nproc", kFlags), (Words{"--nproc-per-node"}));
  EXPECT_EQ(similar_words("--NODE", kFlags), (Words{"--node-rank"}));
  EXPECT_EQ(similar_words("--lo", kFlags),
            (Words{"--log-dir", "--load-weights", "--log-every-n-steps"}));
  EXPECT_EQ(similar_words("conv", {"mlp", "convnet"}), (Words{"convnet"}));
  EXPECT_EQ(similar_words("--LR", {"--lr-gamma", "--lr"}), (Words{"--lr"}));
}

TEST(Words, ATypoMeansTheNearest) {
  EXPECT_EQ(similar_words("--bacth-size", kFlags), (Words{"--batch-size"}));
  EXPECT_EQ(similar_words("--max-epoch", kFlags), (Words{"--max-epochs"}));
  EXPECT_EQ(similar_words("glo", {"auto", "gloo"}), (Words{"gloo"}));
  EXPECT_EQ(similar_words("mpl", {"linear", "mlp"}), (Words{"mlp"}));
}

TEST(Words, ALaterPartMeansTheWordsThatHaveIt) {
  EXPECT_EQ(similar_words("--epochs", kFlags), (Words{"--max-epochs"}));
  EXPECT_EQ(similar_words("--epoch", kFlags), (Words{"--max-epochs"}));
  EXPECT_EQ(similar_words("--dir", kFlags), (Words{"--log-dir", "--data-dir"}));
}

TEST(Words, NothingIsSuggestedWhereNothingIsSimilar) {
  for (const char* word : {"--colour", "-x", "--", "-", "", "--zz"}) {
    EXPECT_EQ(similar_words(word, kFlags), Words()) << word;
    EXPECT_EQ(did_you_mean(word, kFlags), "") << word;
  }
}

TEST(Words, SuggestionsReadAsAQuestion) {
  EXPECT_EQ(did_you_mean("--dir", kFlags), "did you mean '--log-dir' or '--data-dir'?");
  EXPECT_EQ(did_you_mean("--lo", kFlags),
            "did you mean '--log-dir', '--load-weights' or '--log-every-n-steps'?");
}

TEST(Words, AnUnknownWordListsWhatIsKnownWhereNothingIsSimilar) {
  EXPECT_EQ(unknown_word("model", "mpl", {"mlp", "linear"}),
            "unknown model 'mpl'; did you mean 'mlp'?");
  EXPECT_EQ(unknown_word("model", "resnet50", {"mlp", "linear"}),
            "unknown model 'resnet50'; known: mlp, linear");
}

TEST(Words, AnUnknownValueNamesTheFlagAndWhatItTakes) {
  EXPECT_NO_THROW(expect_one_of("--backend", "gloo", {"auto", "gloo"}));
  try {
    expect_one_of("--backend", "glo", {"auto", "gloo"});
    FAIL() << "nothing was thrown";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "--backend: unknown value 'glo'; expected one of auto, gloo\n"
                 "  hint: did you mean 'gloo'?");
  }
}

TEST(Words, Numbers) {
  EXPECT_EQ(counted(1, "epoch"), "1 epoch");
  EXPECT_EQ(counted(0, "epoch"), "0 epochs");
  EXPECT_EQ(counted(1234567, "step"), "1,234,567 steps");
  EXPECT_EQ(counted(1, "micro-batch"), "1 micro-batch");
  EXPECT_EQ(counted(4, "micro-batch"), "4 micro-batches");
  EXPECT_EQ(with_thousands(-123), "-123");
  EXPECT_EQ(with_thousands(-1234), "-1,234");
}

}  // namespace words_test
}  // namespace lockstep
