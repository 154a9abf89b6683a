#pragma once

// What this room's tests share: small files made by hand and the check of a complaint.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::test_files {

/// Writes a file that no crash needs to spare: without a flush to the disk. (Some file systems
/// flush one that is cut to nothing and written anew, so the old one goes first.)
inline void write(const std::filesystem::path& path, std::string_view content) {
  std::filesystem::remove(path);
  FILE* file = std::fopen(path.c_str(), "wb");
  ASSERT_NE(file, nullptr) << path;
  EXPECT_EQ(std::fwrite(content.data(), 1, content.size(), file), content.size());
  EXPECT_EQ(std::fclose(file), 0);
}

/// An IDX file: its header, then the bytes.
inline std::string idx(uint8_t type, const std::vector<uint32_t>& shape, std::string_view bytes) {
  std::string content{'\0', '\0', static_cast<char>(type), static_cast<char>(shape.size())};
  for (const uint32_t size : shape) {
    for (const int shift : {24, 16, 8, 0}) content += static_cast<char>(size >> shift);
  }
  return content + std::string(bytes);
}

/// Packed by zlib; `window_bits` as deflateInit2 takes them: 31 is gzip, -15 raw deflate.
inline std::string deflated(std::string_view content, int window_bits = 31) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 9, Z_DEFLATED, window_bits, 9, Z_DEFAULT_STRATEGY), Z_OK);
  std::string packed(deflateBound(&stream, content.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
  stream.avail_in = static_cast<uInt>(content.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(::deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

/// An npy file: magic, version, header and the bytes.
inline std::string npy(const std::string& header, std::string_view data, int version = 1) {
  std::string content("\x93NUMPY");
  content += static_cast<char>(version);
  content += '\0';
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) {
    content += static_cast<char>((header.size() + 1) >> (8 * i));
  }
  return content + header + "\n" + std::string(data);
}

struct ZipEntry {
  std::string name;
  std::string content;
  bool deflate = false;
};

/// A zip archive of these files.
inline std::string zip(const std::vector<ZipEntry>& entries) {
  std::string archive;
  std::string directory;
  const auto number = [](size_t value, int size) {
    std::string bytes;
    for (int i = 0; i < size; ++i, value >>= 8) bytes += static_cast<char>(value);
    return bytes;
  };
  for (const ZipEntry& entry : entries) {
    const std::string packed = entry.deflate ? deflated(entry.content, -15) : entry.content;
    const auto* bytes = reinterpret_cast<const Bytef*>(entry.content.data());
    const std::string common = number(0, 2) + number(entry.deflate ? 8 : 0, 2) + number(0, 4) +
                               number(crc32_z(0, bytes, entry.content.size()), 4) +
                               number(packed.size(), 4) + number(entry.content.size(), 4) +
                               number(entry.name.size(), 2) + number(0, 2);
    directory += "PK\1\2" + number(20, 2) + number(20, 2) + common + number(0, 10) +
                 number(archive.size(), 4) + entry.name;
    archive += "PK\3\4" + number(20, 2) + common + entry.name + packed;
  }
  const size_t start = archive.size();
  return archive + directory + "PK\5\6" + number(0, 4) + number(entries.size(), 2) +
         number(entries.size(), 2) + number(directory.size(), 4) + number(start, 4) + number(0, 2);
}

/// The four files of a set as MNIST is published, by name.
struct SmallMnist {
  explicit SmallMnist(uint32_t train = 6, uint32_t test = 4)
      : train_images(idx(8, {train, 28, 28}, pixels(train))),
        train_labels(idx(8, {train}, labels(train))),
        test_images(idx(8, {test, 28, 28}, pixels(test))),
        test_labels(idx(8, {test}, labels(test))) {}

  static std::string pixels(uint32_t count) {
    std::string bytes(count * 784, '\0');
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + i / 784);
    return bytes;
  }
  static std::string labels(uint32_t count) {
    std::string bytes(count, '\0');
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>((i * 3 + 9) % 10);
    return bytes;
  }

  std::vector<std::pair<std::string, std::string>> named() const {
    return {{"train-images-idx3-ubyte", train_images},
            {"train-labels-idx1-ubyte", train_labels},
            {"t10k-images-idx3-ubyte", test_images},
            {"t10k-labels-idx1-ubyte", test_labels}};
  }
  void write(const std::filesystem::path& folder, bool gzip) const {
    std::filesystem::create_directories(folder);
    for (const auto& [name, content] : named()) {
      test_files::write(folder / (gzip ? name + ".gz" : name), gzip ? deflated(content) : content);
    }
  }

  std::string train_images;
  std::string train_labels;
  std::string test_images;
  std::string test_labels;
};

/// Runs `action`, which must throw an `E`, and gives its text.
template <typename E, typename Action>
std::string complaint(Action&& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception than expected: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

}  // namespace lockstep::test_files
