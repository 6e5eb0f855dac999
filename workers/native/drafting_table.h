// What the model's own candidates after earlier rows were, by the last few tokens before them, and which tokens come
// most often (as continuation_table.py and frequent_tokens.py in workers/drafters).

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "drafting_slots.h"

using Token = int32_t;

constexpr int CONTEXT = 3;  // tokens of the longest key
constexpr int TOP_K = 8;    // candidates of a row
constexpr Token NO_TOKEN = -1;

// The last tokens of a text, the latest one last; NO_TOKEN stands where there are fewer.
struct Context {
    std::array<Token, CONTEXT> token;

    static Context of(const Token* tokens, int64_t end) {
        Context context;
        for (int i = 0; i < CONTEXT; ++i) {
            const int64_t at = end - CONTEXT + i;
            context.token[i] = at >= 0 ? tokens[at] : NO_TOKEN;
        }
        return context;
    }

    int length() const {
        int length = 0;
        while (length < CONTEXT && token[CONTEXT - 1 - length] != NO_TOKEN) ++length;
        return length;
    }

    Context followed_by(Token next) const {
        Context context;
        for (int i = 1; i < CONTEXT; ++i) context.token[i - 1] = token[i];
        context.token[CONTEXT - 1] = next;
        return context;
    }

    Context last(int length) const {
        Context context = *this;
        for (int i = 0; i < CONTEXT - length; ++i) context.token[i] = NO_TOKEN;
        return context;
    }

    uint32_t hash() const {
        uint32_t value = 0;
        for (const Token t : token) value = mixed(uint64_t{value} << 32 | static_cast<uint32_t>(t));
        return value;
    }
};

// Tokens and their probabilities, best first.
struct Candidates {
    int32_t count;
    std::array<Token, TOP_K> token;
    std::array<float, TOP_K> probability;
};

// `context -> candidates`, the least recently stored contexts dropped. Contexts of different lengths are different
// keys.
class ContinuationTable {
  public:
    explicit ContinuationTable(size_t capacity) : capacity_(capacity) {
        entries_.reserve(capacity);  // not touched before it is used
    }

    const Candidates* find(const Context& context) const {
        const uint32_t entry = number_of(context);
        return entry == Slots::NONE ? nullptr : &entries_[entry].candidates;
    }

    // Overwrite what is known after a context.
    void store(const Context& context, const Candidates& candidates) {
        uint32_t entry = number_of(context);
        if (entry == Slots::NONE) {
            entry = free_entry();
            entries_[entry].context = context;
            slots_.put(context.hash(), entry);
        }
        entries_[entry].candidates = candidates;
        entries_[entry].stored = ++stores_;
        stored_.push_back({entry, stores_});
        if (stored_.size() > 2 * capacity_ + FEW) forget_overwritten();
    }

    // The same for a context and all that it ends with.
    void store_all(const Context& context, const Candidates& candidates) {
        for (int length = context.length(); length > 0; --length) store(context.last(length), candidates);
    }

  private:
    static constexpr size_t FEW = 1024;

    struct Entry {
        Context context;
        Candidates candidates;
        uint64_t stored;  // number of the store that it was last written by
    };

    struct Stored {
        uint32_t entry;
        uint64_t number;
    };

    uint32_t number_of(const Context& context) const {
        const auto is_it = [&](uint32_t entry) { return entries_[entry].context.token == context.token; };
        return slots_.find(context.hash(), is_it);
    }

    // A new entry, or the oldest one's where the table is full.
    uint32_t free_entry() {
        if (entries_.size() < capacity_) {
            entries_.emplace_back();
            return static_cast<uint32_t>(entries_.size() - 1);
        }
        while (is_overwritten(stored_[oldest_])) ++oldest_;
        const uint32_t entry = stored_[oldest_++].entry;
        slots_.renumber(entries_[entry].context.hash(), entry, Slots::NONE);
        return entry;
    }

    bool is_overwritten(const Stored& store) const { return entries_[store.entry].stored != store.number; }

    void forget_overwritten() {
        const auto overwritten = [this](const Stored& store) { return is_overwritten(store); };
        stored_.erase(std::remove_if(stored_.begin() + oldest_, stored_.end(), overwritten), stored_.end());
        stored_.erase(stored_.begin(), stored_.begin() + oldest_);
        oldest_ = 0;
    }

    const size_t capacity_;
    std::vector<Entry> entries_;
    Slots slots_;
    // Stores in their order, from `oldest_` on, those that were overwritten since included. (A linked list of the
    // entries would touch three of them for every store.)
    std::vector<Stored> stored_;
    size_t oldest_ = 0;
    uint64_t stores_ = 0;
};

// Counts tokens and keeps the most frequent at hand; among equals the one that got there first.
class FrequentTokens {
  public:
    struct Frequent {
        Token token;
        double probability;
    };

    void add(const Token* tokens, int64_t count) {
        for (int64_t i = 0; i < count; ++i) ++counts_[tokens[i]].count;
        total_ += count;
        added_.insert(added_.end(), tokens, tokens + count);
    }

    // Relative frequencies of the most frequent tokens, with some mass left for all others.
    const std::vector<Frequent>& top() {
        if (added_.empty()) return top_;
        ++round_;
        ranked_.clear();
        for (const Frequent& frequent : top_) rank(frequent.token);
        for (const Token token : added_) rank(token);
        top_.clear();
        for (const Ranked& one : ranked_) top_.push_back({one.token, one.count / static_cast<double>(total_ + UNSEEN)});
        added_.clear();
        return top_;
    }

  private:
    static constexpr int64_t UNSEEN = 32;  // tokens that are taken to have been something else

    struct Count {
        int64_t count = 0;
        uint64_t ranked_in = 0;  // the last round that looked at the token
    };

    struct Ranked {
        Token token;
        int64_t count;
    };

    void rank(Token token) {
        Count& counted = counts_[token];
        if (counted.ranked_in == round_) return;
        counted.ranked_in = round_;
        auto place = ranked_.end();
        while (place != ranked_.begin() && (place - 1)->count < counted.count) --place;
        if (place - ranked_.begin() >= TOP_K) return;
        ranked_.insert(place, {token, counted.count});
        if (ranked_.size() > TOP_K) ranked_.pop_back();
    }

    std::unordered_map<Token, Count> counts_;
    int64_t total_ = 0;
    uint64_t round_ = 0;
    std::vector<Token> added_;  // since the top was last asked for
    std::vector<Ranked> ranked_;
    std::vector<Frequent> top_;
};
