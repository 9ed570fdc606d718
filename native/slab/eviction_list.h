// Doubly linked lists of handles, from the coldest to the hottest. Several lists share one table of links,
// since a handle is on one list at a time. Every operation but consistent() is O(1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dfkv {

class HandleList {
 public:
  using Handle = std::uint32_t;
  static constexpr Handle kNone = ~Handle{0};

  struct Link {
    Handle colder = kNone;
    Handle hotter = kNone;
  };
  using Links = std::vector<Link>;

  [[nodiscard]] Handle coldest() const { return coldest_; }
  [[nodiscard]] Handle hottest() const { return hottest_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] bool empty() const { return size_ == 0; }

  // Precondition: the handle is on no list, and the table is long enough for it.
  void link_hottest(Links& links, Handle handle) {
    links[handle] = {hottest_, kNone};
    (hottest_ == kNone ? coldest_ : links[hottest_].hotter) = handle;
    hottest_ = handle;
    ++size_;
  }
  // The same at the other end.
  void link_coldest(Links& links, Handle handle) {
    links[handle] = {kNone, coldest_};
    (coldest_ == kNone ? hottest_ : links[coldest_].colder) = handle;
    coldest_ = handle;
    ++size_;
  }
  // Precondition: the handle is on this list.
  void unlink(Links& links, Handle handle) {
    const Link link = links[handle];
    (link.colder == kNone ? coldest_ : links[link.colder].hotter) = link.hotter;
    (link.hotter == kNone ? hottest_ : links[link.hotter].colder) = link.colder;
    --size_;
  }
  void heat(Links& links, Handle handle) {
    unlink(links, handle);
    link_hottest(links, handle);
  }
  // Follows the list both ways. `belongs(handle)` says whether the owner's own record agrees.
  template <typename Belongs>
  [[nodiscard]] bool consistent(const Links& links, Belongs&& belongs) const {
    std::size_t count = 0;
    Handle previous = kNone;
    for (Handle handle = coldest_; handle != kNone; handle = links[handle].hotter) {
      if (++count > size_ || links[handle].colder != previous || !belongs(handle)) return false;
      previous = handle;
    }
    return count == size_ && hottest_ == previous;
  }

 private:
  Handle coldest_ = kNone;
  Handle hottest_ = kNone;
  std::size_t size_ = 0;
};

}  // namespace dfkv
