// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// kind is what a JSON value is, in the words of a message.
type Kind string

const (
	String  Kind = "a string"
	Number  Kind = "a number"
	Boolean Kind = "a boolean"
	List    Kind = "a list"
	Object Kind = "an object"
	Null  Kind = "no value"
)

// kindOf tells by its first character what a valid JSON value is.
func KindOf(value json.RawMessage) Kind {
	switch value[0] {
	case '"':
		return String
	case 't', 'f':
		return Boolean
	case '[':
		return List
	case '{':
		return Object
	case 'n':
		return Null
	default:
		return Number
	}
}

// stringIn returns the string that a value is. What Unicode does not have,
// half a surrogate pair, becomes U+FFFD.
func StringValue(value json.RawMessage) (s string, isString bool) {
	if KindOf(value) != String {
		return "", false
	}
	if bytes.IndexByte(value, '\\') < 0 && utf8.Valid(value) {
		return string(value[1 : len(value)-1]), true
	}
	return s, json.Unmarshal(value, &s) == nil
}

// wrongKind notes a value that is of another kind than its key, or its list,
// can have.
func (f *Document) wrongKind(key string, index int, value json.RawMessage, write string) {
	found := "is " + string(KindOf(value)) + "; write " + write
	if s, isString := StringValue(value); isString {
		// Its quotes are the mistake: they have to be seen.
		f.Fail(key, index, "", policy.Quote(s)+" "+found)
		return
	}
	// A message shows no more of it, and the document need not be kept for it.
	const most = 2 * mostShownWord
	f.Fail(key, index, string(value[:min(len(value), most)]), found)
}

// boolean reads true or false.
func boolean(store func(bool)) reader {
	return func(f *Document, key string, value json.RawMessage) {
		s, _ := StringValue(value)
		switch {
		case KindOf(value) == Boolean:
			store(value[0] == 't')
		case strings.EqualFold(s, "true") || strings.EqualFold(s, "false"):
			f.wrongKind(key, -1, value, strings.ToLower(s)+" without quotes")
		case KindOf(value) == String:
			f.wrongKind(key, -1, value, "true or false, without quotes")
		default:
			f.wrongKind(key, -1, value, "true or false"+orLeaveOut(value))
		}
	}
}

// optional stores a boolean that a source may leave unstated.
func optional(to **bool) func(bool) { return func(b bool) { *to = &b } }

// orLeaveOut adds the other remedy for a null.
func orLeaveOut(value json.RawMessage) string {
	if KindOf(value) == Null {
		return ", or leave the key out"
	}
	return ""
}

// text reads a string that parse makes the value of. The example is one that
// parse takes.
func text[T any](example string, parse func(string) (T, error), store func(T)) reader {
	return func(f *Document, key string, value json.RawMessage) {
		s, isString := StringValue(value)
		if !isString {
			f.wrongKind(key, -1, value, asString(value, example, parse)+orLeaveOut(value))
			return
		}
		v, err := parse(s)
		if err != nil {
			f.Fail(key, -1, s, err.Error())
			return
		}
		store(v)
	}
}

// asString says how to write a string in place of a value that is none.
func asString[T any](value json.RawMessage, example string, parse func(string) (T, error)) string {
	if KindOf(value) == Number {
		if _, err := parse(string(value)); err == nil {
			return "it in quotes: " + policy.Quote(string(value))
		}
	}
	return "a string such as " + policy.Quote(example)
}

// needed reads a key whose absence is a mistake of its own: a null is no more
// than that.
func needed(read reader) reader {
	return func(f *Document, key string, value json.RawMessage) {
		if KindOf(value) != Null {
			read(f, key, value)
		}
	}
}

// unjudged takes any string: the judgment comes once the document is read.
func unjudged(s string) (string, error) { return s, nil }

// list reads a list of strings that parse makes the items of. An item that
// comes again is left out. The list is never nil, so that none is something
// else than not stated.
func list[T comparable](to *[]T, example string, parse func(string) (T, error)) reader {
	return func(f *Document, key string, value json.RawMessage) {
		if KindOf(value) != List {
			f.wrongKind(key, -1, value, asList(value, example, parse))
			return
		}
		items := Elements(value)
		if len(items) > policy.MaxCIDRLimit {
			f.Fail(key, -1, "", fmt.Sprintf("has %d items, more than the %d possible; remove some", len(items), policy.MaxCIDRLimit))
			return
		}
		kept := make([]T, 0, len(items))
		places := make([]int, 0, len(items))
		seen := make(map[T]bool, len(items))
		for i, item := range items {
			if len(f.Mistakes) >= mostMistakes {
				break
			}
			s, isString := StringValue(item)
			if !isString {
				f.wrongKind(key, i, item, asString(item, example, parse)+orDrop(item))
				continue
			}
			v, err := parse(s)
			if err != nil {
				f.Fail(key, i, s, err.Error())
			} else if !seen[v] {
				seen[v] = true
				kept, places = append(kept, v), append(places, i)
			}
		}
		*to = kept
		if f.Indexes == nil {
			f.Indexes = map[string][]int{}
		}
		f.Indexes[key] = places
	}
}

// asList says how to write a list in place of a value that is none.
func asList[T any](value json.RawMessage, example string, parse func(string) (T, error)) string {
	if KindOf(value) == Null {
		return "[] for none, or leave the key out"
	}
	if s, isString := StringValue(value); isString {
		if _, err := parse(s); err == nil {
			return "a list: [" + policy.Quote(s) + "]"
		}
	}
	return "a list such as [" + policy.Quote(example) + "]"
}

func orDrop(item json.RawMessage) string {
	if KindOf(item) == Null {
		return ", or drop the item"
	}
	return ""
}

// count reads a whole number within limits.
func count(to *int, least, most int) reader {
	return func(f *Document, key string, value json.RawMessage) {
		s, isString := StringValue(value)
		if _, err := strconv.Atoi(s); isString && err == nil {
			f.wrongKind(key, -1, value, "it without quotes")
			return
		}
		if KindOf(value) != Number {
			f.wrongKind(key, -1, value, fmt.Sprintf("a whole number from %d to %d", least, most)+orLeaveOut(value))
			return
		}
		n, err := strconv.Atoi(string(value))
		if err != nil || n < least || n > most {
			f.Fail(key, -1, string(value[:min(len(value), 2*mostShownWord)]),
				fmt.Sprintf("is not a whole number from %d to %d; write one", least, most))
			return
		}
		*to = n
	}
}

// interval reads how long something is to take: a text such as "60s" or "1m30s"
// (time.ParseDuration), or whole seconds, with or without quotes.
func Interval(to *time.Duration) reader {
	return func(f *Document, key string, value json.RawMessage) {
		if KindOf(value) == Number {
			value = json.RawMessage(policy.Quote(string(value[:min(len(value), 2*mostShownWord)])))
		}
		text("60s", parseInterval, func(d time.Duration) { *to = d })(f, key, value)
	}
}

func parseInterval(s string) (time.Duration, error) {
	const least = time.Second
	d, err := time.ParseDuration(s)
	if n, notWhole := strconv.ParseInt(s, 10, 64); notWhole == nil {
		d, err = time.Duration(n)*time.Second, nil
		if n > math.MaxInt64/int64(time.Second) {
			return 0, errors.New("is longer than 290 years; write an interval such as 60s")
		}
		if n < 0 {
			d = 0 // whatever became of the product
		}
	}
	switch {
	case s == "":
		return 0, errors.New("is empty; write an interval such as 60s, or leave the key out")
	case err != nil:
		return 0, errors.New("is not an interval; write seconds, such as 60, or a number with its unit: 60s, 2m")
	case d < least:
		return 0, fmt.Errorf("is shorter than an interval can be; write %s or more", least)
	}
	return d, nil
}
