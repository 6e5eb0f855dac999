// Where a context has occurred before: documents of tokens, found by their last two (or one) tokens (as suffix_index.py
// in workers/drafters).

#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "drafting_slots.h"
#include "drafting_table.h"

struct Document : std::enable_shared_from_this<Document> {
    std::vector<Token> tokens;

    int64_t length() const { return static_cast<int64_t>(tokens.size()); }
};

// An earlier occurrence of the last `length` tokens of a context: the document's token at `position` followed them.
// `restart` is where reading goes on at the end of the document, where that ends with the context itself; else -1.
struct Match {
    const Document* document;
    int32_t position, length, restart;

    Token next() const { return document->tokens[position]; }

    // One token further; false at the end of the document.
    bool advance() {
        ++length;
        if (++position < document->length()) return true;
        position = restart;
        return restart >= 0;
    }
};

// Documents that may grow, with the latest places of each key. The oldest documents are dropped beyond `max_tokens`
// (0: no bound).
class SuffixIndex {
  public:
    explicit SuffixIndex(int shortest_key, int64_t max_tokens = 0)
        : shortest_key_(shortest_key), max_tokens_(max_tokens) {}

    // A new document of some tokens, none of which is found.
    Document* add(const Token* tokens, int64_t count) {
        documents_.push_back(std::make_shared<Document>());
        documents_.back()->tokens.assign(tokens, tokens + count);
        num_tokens_ += count;
        return documents_.back().get();
    }

    void extend(Document* document, const Token* tokens, int64_t count) {
        if (count <= 0) return;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t position = document->length();
            for (int length = LONGEST_KEY; length >= shortest_key_; --length) {
                if (length <= position) note(key(document->tokens.data() + position, length), document, position);
            }
            document->tokens.push_back(tokens[i]);
        }
        num_tokens_ += count;
        while (max_tokens_ && num_tokens_ > max_tokens_ && documents_.size() > 1) drop_oldest();
    }

    // Earlier occurrences of the end of `tokens[:end]`, latest first, found by the longest key that occurs. Those in
    // `own`, the document that holds the tokens themselves, go round at its end.
    void matches(const Token* tokens, int64_t end, int64_t max_length, const Document* own,
                 std::vector<Match>& found) const {
        for (int known = LONGEST_KEY; known >= shortest_key_; --known) {
            if (known > std::min(end, max_length)) continue;
            const uint32_t number = number_of(key(tokens + end, known));
            if (number == Slots::NONE) continue;
            const auto& all = keys_[number].places;
            const size_t count = std::min<size_t>(all.size(), MAX_PLACES);
            for (auto place = all.rbegin(); place != all.rbegin() + count; ++place) {
                const Token* before = place->document->tokens.data() + place->position;
                const int64_t limit = std::min({max_length, int64_t{place->position}, end});
                int32_t length = known;
                while (length < limit && before[-1 - length] == tokens[end - 1 - length]) ++length;
                found.push_back({place->document, place->position, length,
                                 place->document == own ? place->position : -1});
            }
            return;
        }
    }

  private:
    static constexpr int LONGEST_KEY = 2;
    static constexpr size_t MAX_PLACES = 8;  // of a key that are looked at

    struct Place {
        const Document* document;
        int32_t position;
    };

    struct Key {
        uint64_t key;
        std::vector<Place> places;
    };

    // Of the `length` tokens before `end`: no token is negative, so keys of one token are no keys of two.
    static uint64_t key(const Token* end, int length) {
        const uint64_t before = static_cast<uint32_t>(length == 2 ? end[-2] : NO_TOKEN);
        return before << 32 | static_cast<uint32_t>(end[-1]);
    }

    uint32_t number_of(uint64_t key) const {
        return slots_.find(mixed(key), [&](uint32_t number) { return keys_[number].key == key; });
    }

    void note(uint64_t key, const Document* document, int64_t position) {
        uint32_t number = number_of(key);
        if (number == Slots::NONE) {
            number = static_cast<uint32_t>(keys_.size());
            keys_.push_back({key, {}});
            slots_.put(mixed(key), number);
        }
        auto& places = keys_[number].places;
        places.push_back({document, static_cast<int32_t>(position)});
        if (places.size() >= 2 * MAX_PLACES) places.erase(places.begin(), places.end() - MAX_PLACES);
    }

    // The last key takes the number of one that is gone.
    void forget(uint32_t number) {
        const auto last = static_cast<uint32_t>(keys_.size() - 1);
        slots_.renumber(mixed(keys_[number].key), number, Slots::NONE);
        if (number != last) {
            slots_.renumber(mixed(keys_[last].key), last, number);
            keys_[number] = std::move(keys_[last]);
        }
        keys_.pop_back();
    }

    // Forget a document and all its places.
    void drop_oldest() {
        const std::shared_ptr<Document> document = documents_.front();
        documents_.pop_front();
        num_tokens_ -= document->length();
        for (int length = shortest_key_; length <= LONGEST_KEY; ++length) {
            for (int64_t end = length; end < document->length(); ++end) {
                const uint32_t number = number_of(key(document->tokens.data() + end, length));
                if (number == Slots::NONE) continue;
                auto& places = keys_[number].places;
                const auto is_its = [&](const Place& place) { return place.document == document.get(); };
                places.erase(std::remove_if(places.begin(), places.end(), is_its), places.end());
                if (places.empty()) forget(number);
            }
        }
    }

    const int shortest_key_;
    const int64_t max_tokens_;
    int64_t num_tokens_ = 0;
    std::deque<std::shared_ptr<Document>> documents_;  // the oldest first
    std::vector<Key> keys_;
    Slots slots_;
};
