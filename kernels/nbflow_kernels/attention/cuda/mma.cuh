// mma.m16n8k16 and ldmatrix wrappers for float16 and bfloat16.
#pragma once
#include "cuda/ptx.cuh"
#include "kv_cache/cuda_codec.cuh"

struct Half {
    static DEV_METHOD u32 pack(float low, float high) {
        u32 both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    static DEV_METHOD float low(u32 both) { return half_to_float(both & 0xffff); }
    static DEV_METHOD float high(u32 both) { return half_to_float(both >> 16); }
    static constexpr u32 ONES = 0x3c003c00;
    static DEV_METHOD void mma(float* c, const u32* a, u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct Bfloat {
    static DEV_METHOD u32 pack(float low, float high) {
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    static DEV_METHOD float low(u32 both) { return __uint_as_float(both << 16); }
    static DEV_METHOD float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }
    static constexpr u32 ONES = 0x3f803f80;
    static DEV_METHOD void mma(float* c, const u32* a, u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

template <int Kind>
struct ElementOf {
    typedef Half Type;
};
template <>
struct ElementOf<BF16> {
    typedef Bfloat Type;
};

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEV void load_matrices(u32* r, const u16* at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(at))
                 : "memory");
}

DEV void load_transposed(u32* r, const u16* at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(at))
                 : "memory");
}
