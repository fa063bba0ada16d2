// 16-bit floating-point types that compute in f32 and round when they are stored.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

template <class Format> struct Narrow {
    uint16_t bits;

    Narrow() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    Narrow(T x) : bits(Format::narrow(static_cast<float>(x))) {}
    operator float() const { return Format::widen(bits); }
    template <class T> Narrow &operator+=(T x) { return *this = Narrow(float(*this) + float(x)); }
    template <class T> Narrow &operator-=(T x) { return *this = Narrow(float(*this) - float(x)); }
    template <class T> Narrow &operator*=(T x) { return *this = Narrow(float(*this) * float(x)); }
    template <class T> Narrow &operator/=(T x) { return *this = Narrow(float(*this) / float(x)); }
};

template <class Format> bool __hisnan(Narrow<Format> x) { return std::isnan(float(x)); }
template <class Format> Narrow<Format> hsqrt(Narrow<Format> x) { return std::sqrt(float(x)); }
template <class Format> Narrow<Format> hcos(Narrow<Format> x) { return std::cos(float(x)); }
template <class Format> Narrow<Format> hsin(Narrow<Format> x) { return std::sin(float(x)); }
template <class Format> Narrow<Format> hlog(Narrow<Format> x) { return std::log(float(x)); }
template <class Format> Narrow<Format> hexp(Narrow<Format> x) { return std::exp(float(x)); }
template <class Format> Narrow<Format> __habs(Narrow<Format> x) { return std::fabs(float(x)); }

template <class Format> Narrow<Format> __hmax_nan(Narrow<Format> a, Narrow<Format> b) {
    return __hisnan(a) || float(a) > float(b) ? a : b;
}

template <class Format> Narrow<Format> __hmin_nan(Narrow<Format> a, Narrow<Format> b) {
    return __hisnan(a) || float(a) < float(b) ? a : b;
}

template <class Format> struct Pair {
    Narrow<Format> x, y;
};

template <class Format> Pair<Format> __hadd2(Pair<Format> a, Pair<Format> b) {
    return {float(a.x) + float(b.x), float(a.y) + float(b.y)};
}

template <class Format> Pair<Format> __hmul2(Pair<Format> a, Pair<Format> b) {
    return {float(a.x) * float(b.x), float(a.y) * float(b.y)};
}
