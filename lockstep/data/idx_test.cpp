#include "lockstep/data/idx.h"

#include <ATen/core/Formatting.h>
#include <ATen/ops/tensor.h>

#include <span>

#include "lockstep/base/file.h"
#include "tests/support/test_files.h"

namespace lockstep {
namespace idx_test {

namespace fs = std::filesystem;
using test_files::complaint;
using test_files::deflated;
using test_files::idx;
using testing::AllOf;
using testing::HasSubstr;

class Idx : public testing::Test {
 protected:
  fs::path write(std::string_view content, const std::string& name = "x-idx") {
    const fs::path path = folder_.path() / name;
    test_files::write(path, content);
    return path;
  }
  std::string complaint_about(std::string_view content) {
    const fs::path path = write(content);
    const std::string text = complaint<DataError>([&] { load_idx(path); });
    EXPECT_THAT(text, HasSubstr(path.string() + ", byte "));
    return text;
  }
  TemporaryDirectory folder_;
};

TEST_F(Idx, AContentInMemoryGivesWhatTheFileGives) {
  const std::string content = idx(8, {2}, "\x01\xff");
  const at::Tensor tensor = load_idx("name", std::as_bytes(std::span(content)));
  EXPECT_TRUE(tensor.equal(at::tensor({1, 255}, at::kByte)));
  EXPECT_TRUE(tensor.equal(load_idx(write(content)))) << tensor;
}

TEST_F(Idx, PlainAndGzipAreTheSame) {
  const std::string content = idx(8, {2, 3}, "abcdef");
  const at::Tensor plain = load_idx(write(content));
  EXPECT_EQ(plain.sizes(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(plain[1][2].item<int>(), 'f');
  // The first bytes tell, not the name; members of a gzip file are its parts in order.
  EXPECT_TRUE(load_idx(write(deflated(content), "no-suffix")).equal(plain));
  const std::string members = deflated(std::string_view(content).substr(0, 9)) +
                              deflated(std::string_view(content).substr(9));
  EXPECT_TRUE(load_idx(write(members, "members.gz")).equal(plain));
  EXPECT_TRUE(load_idx(write(content, "lies.gz")).equal(plain));
}

TEST_F(Idx, LargerThanTheBuffers) {
  std::string bytes(3'000'000, '\0');
  uint32_t state = 1;
  for (char& byte : bytes) byte = static_cast<char>((state = state * 1664525 + 1013904223) >> 28);
  const std::string content = idx(8, {3000, 1000}, bytes);
  for (const std::string& file : {content, deflated(content)}) {
    const at::Tensor tensor = load_idx(write(file));
    ASSERT_EQ(tensor.nbytes(), bytes.size());
    EXPECT_EQ(std::memcmp(tensor.const_data_ptr(), bytes.data(), bytes.size()), 0);
  }
}

TEST_F(Idx, NoElementsAreAnEmptyTensor) {
  EXPECT_EQ(load_idx(write(idx(8, {0, 28, 28}, ""))).sizes(), (std::vector<int64_t>{0, 28, 28}));
  EXPECT_EQ(load_idx(write(deflated(idx(8, {0}, "")))).numel(), 0);
}

TEST_F(Idx, MissingFileIsNamed) {
  const std::string text = complaint<SystemError>([&] { load_idx(folder_.path() / "not-there"); });
  EXPECT_THAT(text, HasSubstr("not-there: No such file"));
}

TEST_F(Idx, EmptyFile) {
  EXPECT_THAT(complaint_about(""),
              AllOf(HasSubstr("byte 0: the file is empty; expected an IDX header"),
                    HasSubstr("hint: copy or download the file again")));
}

TEST_F(Idx, ForeignFile) {
  for (const std::string& content :
       {std::string("\x89PNG\r\n"), idx(0x0B, {1}, "ab"), idx(8, {}, "a")})
    EXPECT_THAT(complaint_about(content),
                AllOf(HasSubstr("byte 0: no IDX file of bytes"), HasSubstr("00 00 08 03")));
}

TEST_F(Idx, TruncatedHeader) {
  EXPECT_THAT(complaint_about(idx(8, {2, 3}, "").substr(0, 10)),
              AllOf(HasSubstr("byte 10: the file ends here; expected 4 bytes of the header's sizes "
                              "from byte 8 on, got 2")));
}

TEST_F(Idx, TruncatedElements) {
  EXPECT_THAT(complaint_about(idx(8, {2, 3}, "abcde")),
              AllOf(HasSubstr("byte 12: the header promises 2 x 3 elements of Byte"),
                    HasSubstr("(6 bytes), but at most 5 bytes follow")));
  // What a gzip file will yield shows only while it is inflated.
  EXPECT_THAT(complaint_about(deflated(idx(8, {2, 3}, "abcde"))),
              AllOf(HasSubstr("byte 17 of the decompressed content: the file ends here; expected 6 "
                              "bytes of the elements from byte 12 on, got 5")));
}

TEST_F(Idx, TruncatedGzip) {
  const std::string whole =
      deflated(idx(8, {2, 300}, test_files::SmallMnist::pixels(1).substr(0, 600)));
  for (const size_t cut : {whole.size() - 1, whole.size() - 8, whole.size() / 2, size_t{4}}) {
    EXPECT_THAT(complaint_about(whole.substr(0, cut)),
                HasSubstr("the compressed data ends here; expected more: the file is truncated"))
        << cut;
  }
}

TEST_F(Idx, DamagedGzip) {
  const std::string whole =
      deflated(idx(8, {2, 300}, test_files::SmallMnist::pixels(1).substr(0, 600)));
  std::string checksum = whole;
  checksum[whole.size() - 8] ^= 1;
  EXPECT_THAT(complaint_about(checksum),
              HasSubstr("byte 612 of the decompressed content: the compressed data is damaged "
                        "(incorrect data check)"));
  std::string method = whole;
  method[2] = 7;
  EXPECT_THAT(complaint_about(method), HasSubstr("the compressed data is damaged (error"));
}

/// gzip's member with a checksum of its header, and a name of this many bytes.
std::string with_header(const std::string& content, size_t name_bytes) {
  const std::string member = deflated(content);
  std::string header = member.substr(0, 10);
  header[3] = 2 | (name_bytes > 0 ? 8 : 0);
  if (name_bytes > 0) header += std::string(name_bytes, 'n') + '\0';
  const auto* bytes = reinterpret_cast<const Bytef*>(header.data());
  const uint32_t checksum = crc32_z(0, bytes, header.size());
  for (const int shift : {0, 8}) header += static_cast<char>(checksum >> shift);
  return header + member.substr(10);
}

TEST_F(Idx, GzipHeadersAcrossTheReadersBuffer) {
  const std::string content = idx(8, {2, 3}, "abcdef");
  constexpr size_t kBuffer = 1 << 18;
  const std::string first = content.substr(0, 9), second = content.substr(9);
  const size_t rest = with_header(first, 1).size() - 1;
  for (const size_t before : {1, 3, 9, 11}) {
    const auto members = with_header(first, kBuffer - before - rest) + with_header(second, 0);
    EXPECT_EQ(load_idx(write(members)).numel(), 6) << before;
  }
}

TEST_F(Idx, BytesAfterAGzipMember) {
  const std::string whole = deflated(idx(8, {2}, "ab"));
  for (const std::string after : {"x", "garbage", "garbage that is longer than a header"}) {
    EXPECT_THAT(complaint_about(whole + after), HasSubstr("bytes follow that are no gzip member"));
  }
}

TEST_F(Idx, TrailingBytes) {
  EXPECT_THAT(complaint_about(idx(8, {2}, "abc")),
              HasSubstr("byte 10: more bytes follow; expected the end of the file"));
  EXPECT_THAT(complaint_about(deflated(idx(8, {2}, "abc"))), HasSubstr("more bytes follow"));
}

TEST_F(Idx, HeaderCannotAskForMoreMemoryThanTheFileHas) {
  for (const std::string& content :
       {idx(8, {0xffffffff, 0xffffffff, 0xffffffff}, "a"),
        deflated(idx(8, {0xffffffff, 0xffffffff}, "a")), deflated(idx(8, {1u << 30}, "a"))}) {
    EXPECT_THAT(complaint_about(content), HasSubstr("bytes follow: the file is truncated"));
  }
}

}  // namespace idx_test
}  // namespace lockstep
