#include "lockstep/launch/line_cutter.h"

#include <gtest/gtest.h>

#include <random>

namespace lockstep::launch {
namespace line_cutter_test {

using Lines = std::vector<std::string>;

class LineCutterTest : public testing::Test {
 protected:
  void feed(std::string_view bytes, int ms = 0) {
    cutter_.feed(bytes, start_ + std::chrono::milliseconds(ms), sink_);
  }
  LineCutter cutter_;
  Lines lines_;
  LineCutter::Sink sink_ = [this](std::string_view line) { lines_.emplace_back(line); };
  LineCutter::Time start_ = std::chrono::steady_clock::now();
};

TEST_F(LineCutterTest, AQuestionIsTakenOnceItHasStoodForAMoment) {
  constexpr auto kDelay = LineCutter::kPromptDelay;
  feed("a\n(Pdb) ");
  EXPECT_TRUE(cutter_.has_unfinished());
  EXPECT_EQ(cutter_.take_prompt(start_ + kDelay / 2), "");
  EXPECT_EQ(cutter_.take_prompt(start_ + kDelay), "(Pdb) ");
  EXPECT_FALSE(cutter_.has_unfinished());
  feed("b\n\r12%");
  EXPECT_EQ(cutter_.take_prompt(start_ + 2 * kDelay), "");
  EXPECT_EQ(lines_, (Lines{"a", "b"}));
}

TEST_F(LineCutterTest, PiecesOfALineComeAsOne) {
  feed("a");
  feed("b\nc\n\nd");
  EXPECT_EQ(lines_, (Lines{"ab", "c", ""}));
  cutter_.finish(sink_);
  EXPECT_EQ(lines_.back(), "d");
  cutter_.finish(sink_);
  EXPECT_EQ(lines_.size(), 4u);
}

TEST_F(LineCutterTest, NoByteIsLostWhereverItIsCut) {
  std::mt19937 random(7);
  std::string sent;
  for (int i = 0; i < 20'000; ++i) sent += static_cast<char>(random() % 40 == 0 ? '\n' : random());
  for (size_t at = 0; at < sent.size();) {
    const size_t size = std::min<size_t>(sent.size() - at, random() % 300);
    feed(std::string_view(sent).substr(at, size));
    at += size;
  }
  cutter_.finish(sink_);
  std::string got;
  for (const auto& line : lines_) got += line + "\n";
  if (sent.back() != '\n') sent += '\n';
  EXPECT_EQ(got, sent);
}

TEST_F(LineCutterTest, AnEndlessLineComesInPieces) {
  const std::string block(300'000, 'x');
  for (int i = 0; i < 10; ++i) feed(block);
  ASSERT_EQ(lines_.size(), 2u);
  EXPECT_EQ(lines_[0].size(), LineCutter::kLongestLine);
  feed("\n");
  EXPECT_EQ(lines_[2].size(), 3'000'000 - 2 * LineCutter::kLongestLine);
}

TEST_F(LineCutterTest, AProgressBarIsSeenAboutOnceASecond) {
  feed("\r10%", 0);
  feed("\r20%", 300);
  EXPECT_TRUE(lines_.empty());
  feed("\r30%", 1100);
  EXPECT_EQ(lines_, (Lines{"\r10%\r20%"}));
  feed("\r40%", 1200);
  EXPECT_EQ(lines_.size(), 1u);
  feed("\r50%\n", 1300);
  EXPECT_EQ(lines_.back(), "\r30%\r40%\r50%");
}

TEST(Tail, KeepsTheLastLines) {
  Tail tail;
  EXPECT_TRUE(tail.lines().empty());
  for (int i = 0; i < 100; ++i) tail.feed("line " + std::to_string(i) + "\n");
  const auto lines = tail.lines();
  ASSERT_EQ(lines.size(), Tail::kLines);
  EXPECT_EQ(lines.front(), "line 80");
  EXPECT_EQ(lines.back(), "line 99");
  tail.feed("cut sh");
  tail.feed("ort");
  EXPECT_EQ(tail.lines().back(), "cut short");
}

TEST(Tail, IsBoundedInBytes) {
  Tail tail;
  tail.feed(std::string(1'000'000, 'x'));
  ASSERT_EQ(tail.lines().size(), 1u);
  EXPECT_EQ(tail.lines()[0].size(), Tail::kBytes);
}

}  // namespace line_cutter_test
}  // namespace lockstep::launch
