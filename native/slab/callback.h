// A function that is kept until it is called: as std::function, but move-only, and what it holds is in
// recycled memory, so that handing work to another thread allocates nothing.
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

#include "slab/recycled.h"

namespace dfkv {

template <typename Signature>
class Callback;

template <typename Result, typename... Arguments>
class Callback<Result(Arguments...)> {
 public:
  Callback() = default;
  Callback(std::nullptr_t) {}
  template <typename Function>
  requires(!std::same_as<Function, Callback> && std::is_invocable_r_v<Result, Function&, Arguments...>)
      Callback(Function function)
      : held_(std::make_unique<Of<Function>>(std::move(function))) {}

  explicit operator bool() const { return held_ != nullptr; }
  // Precondition: it holds a function.
  Result operator()(Arguments... arguments) const {
    return held_->call(std::forward<Arguments>(arguments)...);
  }

 private:
  struct Held {
    virtual ~Held() = default;
    virtual Result call(Arguments... arguments) = 0;
  };
  template <typename Function>
  struct Of final : Held, Recycled<Of<Function>> {
    explicit Of(Function&& from) : function(std::move(from)) {}
    Result call(Arguments... arguments) override {
      if constexpr (std::is_void_v<Result>) {
        function(std::forward<Arguments>(arguments)...);
      } else {
        return function(std::forward<Arguments>(arguments)...);
      }
    }
    Function function;
  };
  std::unique_ptr<Held> held_;
};

}  // namespace dfkv
