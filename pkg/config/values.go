// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/containernetworking/cni/pkg/utils"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Kind is the type of a JSON value, as messages name it.
type Kind string

// The types of JSON values.
const (
	String  Kind = "a string"
	Number  Kind = "a number"
	Boolean Kind = "a boolean"
	List    Kind = "a list"
	Object  Kind = "an object"
	Null    Kind = "no value"
)

// KindOf returns the type of a valid JSON value.
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
	}
	return Number
}

// stringValue returns a JSON string as Go has it. Half a surrogate pair becomes U+FFFD.
func stringValue(value json.RawMessage) (s string, isString bool) {
	if KindOf(value) != String {
		return "", false
	}
	if bytes.IndexByte(value, '\\') < 0 && utf8.Valid(value) {
		return string(value[1 : len(value)-1]), true
	}
	return s, json.Unmarshal(value, &s) == nil
}

// Value reads the value of a key.
type Value struct {
	Kind  Kind  // "" for any
	field field // nil: the key is ignored
}

// field is where the value of a key is stored.
type field interface {
	// want returns what to write in place of a value of another kind.
	want() string
	// read stores a JSON value of the kind and records its mistakes in the document.
	read(d *Document, key string, value json.RawMessage)
	// text returns the stored value as a flag takes it, "" for none.
	text() string
}

// Read stores a JSON value and records its mistakes in the document.
func (v Value) Read(d *Document, key string, value json.RawMessage) {
	if v.field == nil {
		return
	}
	if v.Kind != "" && KindOf(value) != v.Kind {
		d.wrongKind(key, -1, value, v.field.want())
		return
	}
	v.field.read(d, key, value)
}

// Text returns the stored value as a flag takes it, "" for none.
func (v Value) Text() string { return v.field.text() }

func (v Value) fromFlag(text string) (json.RawMessage, error) {
	switch v.Kind {
	case Boolean:
		b, err := strconv.ParseBool(text) // as the agents parse theirs
		if err != nil {
			return nil, errors.New("is neither true nor false; write one of them")
		}
		return json.Marshal(b)
	case Number:
		n, err := strconv.Atoi(text)
		if err != nil {
			return nil, errors.New("is not a whole number; write one")
		}
		return json.Marshal(n)
	case List:
		items := strings.Split(text, ",")
		for i, item := range items {
			items[i] = strings.TrimSpace(item)
		}
		if len(items) == 1 && items[0] == "" {
			items = []string{}
		}
		return json.Marshal(items)
	}
	return json.Marshal(text)
}

// wrongKind records a value whose type the key or the list does not allow.
func (d *Document) wrongKind(key string, index int, value json.RawMessage, write string) {
	found := "is " + string(KindOf(value)) + "; write " + write
	switch {
	case KindOf(value) == Null && index >= 0:
		found += ", or drop the item"
	case KindOf(value) == Null:
		found += ", or leave the key out"
	}
	if s, isString := stringValue(value); isString {
		// Its quotes are the mistake, so the message shows them.
		d.Fail(key, index, "", policy.Quote(s)+" "+found)
		return
	}
	d.Fail(key, index, string(value), found)
}

func boolean(to *bool) Value { return Value{Boolean, boolField{to}} }

type boolField struct{ to *bool }

func (f boolField) want() string { return "true or false" }

func (f boolField) read(_ *Document, _ string, value json.RawMessage) { *f.to = value[0] == 't' }

func (f boolField) text() string { return fmt.Sprint(*f.to) }

// optional reads a boolean that a source may leave out.
func optional(to **bool) Value { return Value{Boolean, optionalField{to}} }

type optionalField struct{ to **bool }

func (f optionalField) want() string { return "true or false" }

func (f optionalField) read(_ *Document, _ string, value json.RawMessage) {
	*f.to = new(value[0] == 't')
}

func (f optionalField) text() string { return textOf(*f.to) }

// textOf returns a stored value as text, "" for none.
func textOf[T any](stored *T) string {
	if stored == nil {
		return ""
	}
	return fmt.Sprint(*stored)
}

// text reads a string with parse, which accepts the example.
func text[T any](to *T, example string, parse func(string) (T, error)) Value {
	return Value{String, textField[T]{to, example, parse}}
}

type textField[T any] struct {
	to      *T
	example string
	parse   func(string) (T, error)
}

func (f textField[T]) want() string { return stringLike(f.example) }

func (f textField[T]) read(d *Document, key string, value json.RawMessage) {
	v, isValid := readText(d, key, value, f.parse)
	if isValid {
		*f.to = v
	}
}

func (f textField[T]) text() string { return fmt.Sprint(*f.to) }

// readText parses the string of a key, or records its mistake.
func readText[T any](
	d *Document, key string, value json.RawMessage, parse func(string) (T, error),
) (v T, isValid bool) {
	s, _ := stringValue(value)
	v, err := parse(s)
	if err != nil {
		d.Fail(key, -1, s, err.Error())
		return v, false
	}
	return v, true
}

func stringLike(example string) string { return "a string such as " + policy.Quote(example) }

// optionalText reads a string that a source may leave out.
func optionalText[T any](to **T, example string, parse func(string) (T, error)) Value {
	return Value{String, optionalTextField[T]{to, example, parse}}
}

type optionalTextField[T any] struct {
	to      **T
	example string
	parse   func(string) (T, error)
}

func (f optionalTextField[T]) want() string { return stringLike(f.example) }

func (f optionalTextField[T]) read(d *Document, key string, value json.RawMessage) {
	v, isValid := readText(d, key, value, f.parse)
	if isValid {
		*f.to = &v
	}
}

func (f optionalTextField[T]) text() string { return textOf(*f.to) }

// anyText accepts any string: it is validated once the document is read.
func anyText[T ~string](s string) (T, error) { return T(s), nil }

// list reads a list of strings with parse, without repeated items. An empty list is not nil.
func list[T comparable](to *[]T, example string, parse func(string) (T, error)) Value {
	return Value{List, listField[T]{to, example, parse}}
}

type listField[T comparable] struct {
	to      *[]T
	example string
	parse   func(string) (T, error)
}

func (f listField[T]) want() string { return "a list such as [" + policy.Quote(f.example) + "]" }

func (f listField[T]) text() string {
	text := fmt.Sprint(*f.to) // [a b]
	return strings.ReplaceAll(text[1:len(text)-1], " ", ",")
}

func (f listField[T]) read(d *Document, key string, value json.RawMessage) {
	items := elements(value)
	if len(items) > policy.MaxCIDRLimit {
		d.Fail(key, -1, "", fmt.Sprintf("has %d items, more than the %d possible; remove some",
			len(items), policy.MaxCIDRLimit))
		return
	}
	kept := make([]T, 0, len(items))
	indexes := make([]int, 0, len(items))
	isKept := make(map[T]bool, len(items))
	for i, item := range items {
		if len(d.Mistakes) >= maxMistakes {
			break
		}
		v, isValid := f.readItem(d, key, i, item)
		if !isValid || isKept[v] {
			continue
		}
		isKept[v] = true
		kept = append(kept, v)
		indexes = append(indexes, i)
	}
	*f.to = kept
	d.Indexes[key] = indexes
}

// readItem returns the value of an item, or records its mistake.
func (f listField[T]) readItem(d *Document, key string, i int, item json.RawMessage) (v T, isValid bool) {
	s, isString := stringValue(item)
	if !isString {
		d.wrongKind(key, i, item, stringLike(f.example))
		return v, false
	}
	v, err := f.parse(s)
	if err != nil {
		d.Fail(key, i, s, err.Error())
		return v, false
	}
	return v, true
}

// count reads a whole number.
func count(to *int, least, most int) Value { return Value{Number, countField{to, least, most}} }

type countField struct {
	to          *int
	least, most int
}

func (f countField) want() string {
	return fmt.Sprintf("a whole number from %d to %d", f.least, f.most)
}

func (f countField) read(d *Document, key string, value json.RawMessage) {
	n, err := strconv.Atoi(string(value))
	isInRange := f.least <= n && n <= f.most
	if err != nil || !isInRange {
		d.Fail(key, -1, string(value), "is not "+f.want()+"; write one")
		return
	}
	*f.to = n
}

func (f countField) text() string {
	if *f.to == 0 { // none
		return ""
	}
	return strconv.Itoa(*f.to)
}

// Interval reads a duration of at least a second, such as "1m30s", or whole seconds.
func Interval(to *time.Duration) Value { return Value{field: intervalField{to}} }

type intervalField struct{ to *time.Duration }

func (f intervalField) want() string { return stringLike("60s") }

func (f intervalField) read(d *Document, key string, value json.RawMessage) {
	var s string
	switch KindOf(value) {
	case Number:
		s = string(value)
	case String:
		s, _ = stringValue(value)
	default:
		d.wrongKind(key, -1, value, f.want())
		return
	}
	interval, err := parseInterval(s)
	if err != nil {
		d.Fail(key, -1, s, err.Error())
		return
	}
	*f.to = interval
}

// text writes 2m and 1h0m for what time.Duration writes as 2m0s and 1h0m0s.
func (f intervalField) text() string { return strings.Replace(f.to.String(), "m0s", "m", 1) }

func parseInterval(s string) (time.Duration, error) {
	const least = time.Second
	withUnit := s
	_, err := strconv.Atoi(s)
	isSeconds := err == nil
	if isSeconds {
		withUnit = s + "s"
	}
	interval, err := time.ParseDuration(withUnit)
	if err != nil {
		return 0, errors.New("is not an interval; write seconds, such as 60, or a number with its unit: 60s, 2m")
	}
	if interval < least {
		return 0, fmt.Errorf("is shorter than an interval can be; write %s or more", least)
	}
	return interval, nil
}

// directory reads an absolute path. Repeated slashes and one at the end mean nothing.
func directory(to *string, example string) Value { return text(to, example, pathLike(example)) }

// dataDirectory reads the path of a dataDir, which a rule's comment has to hold: xt_comment takes 255 bytes.
func dataDirectory(to *string) Value { return text(to, DefaultDataDir, parseDataDirectory) }

func parseDataDirectory(s string) (string, error) {
	const (
		most    = 200
		letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
		digits  = "0123456789"
		marks   = "/._-+@"
	)
	clean, err := parsePath(s, DefaultDataDir)
	if err != nil {
		return "", err
	}
	fromFirstOther := strings.TrimLeft(clean, letters+digits+marks)
	if fromFirstOther != "" {
		other, _ := utf8.DecodeRuneInString(fromFirstOther)
		return "", fmt.Errorf("holds %q; write a path of letters, digits and %s, such as %s",
			string(other), marks, DefaultDataDir)
	}
	if len(clean) > most {
		return "", fmt.Errorf("has %d bytes; write a path of at most %d", len(clean), most)
	}
	return clean, nil
}

// pathLike returns the function that parses the path of a directory. Messages give the example.
func pathLike(example string) func(string) (string, error) {
	return func(s string) (string, error) { return parsePath(s, example) }
}

func parsePath(s, example string) (string, error) {
	if s == "" {
		return "", fmt.Errorf("is empty; write an absolute path such as %s, or leave the key out", example)
	}
	if !filepath.IsAbs(s) {
		return "", fmt.Errorf("is relative; write an absolute path such as %s", example)
	}
	return filepath.Clean(s), nil
}

func networkName(to *string) Value { return text(to, "podnet", parseNetworkName) }

func (d *Document) requireName(network string) {
	if network == "" && !d.Flawed["name"] {
		d.Fail("name", -1, "", `is missing; name the network, such as "podnet"`)
	}
}

// parseNetworkName accepts what the CNI spec does (section "Network configuration objects").
func parseNetworkName(s string) (string, error) {
	if s == "" {
		return "", errors.New(`is empty; name the network, such as "podnet"`)
	}
	if utils.ValidateNetworkName(s) != nil {
		return "", errors.New("is not the name of a network; write letters, digits, '_', '.' and '-', " +
			"the first a letter or a digit")
	}
	return s, nil
}

// orEmpty returns the function that accepts "" and what parse accepts.
func orEmpty(parse func(string) (string, error)) func(string) (string, error) {
	return func(s string) (string, error) {
		if s == "" {
			return "", nil
		}
		return parse(s)
	}
}

func oneOf(to policy.Word) Value { return Value{String, wordField{to}} }

type wordField struct{ to policy.Word }

func (f wordField) want() string { return `"` + strings.Join(f.to.Choices(), `" or "`) + `"` }

func (f wordField) read(d *Document, key string, value json.RawMessage) {
	s, _ := stringValue(value)
	if err := f.to.Set(s); err != nil {
		d.Fail(key, -1, s, err.Error())
	}
}

func (f wordField) text() string { return f.to.String() }

// parseListen accepts HOST:PORT. The host may be empty, and the port 0.
func parseListen(s string) (string, error) {
	_, port, err := net.SplitHostPort(s)
	_, portErr := strconv.ParseUint(port, 10, 16)
	if err != nil || portErr != nil {
		return "", errors.New(`is not an address to listen on; ` +
			`write HOST:PORT such as 127.0.0.1:19820 or [::1]:19820, or "" for off`)
	}
	return s, nil
}

// keysOf returns the keys of rows, for every kind of document. It leaves out Usage, which only flags need:
// each ADD calls it.
func keysOf(rows []policy.Key) []Key {
	keys := make([]Key, len(rows))
	for i, k := range rows {
		key := &keys[i]
		key.Name = k.Name
		switch to := k.Field.(type) {
		case **bool:
			key.Value = optional(to)
		case *bool:
			key.Value = boolean(to)
		case *[]netip.Prefix:
			key.Placeholder = "CIDR,..."
			key.Value = list(to, "10.0.0.0/8", policy.ParsePrefix)
		case *policy.AddressItems:
			key.Placeholder = "CIDR,..."
			key.Value = list((*[]netip.Prefix)(to), "192.0.2.0/24", policy.ParseAddressItem)
		case *[]string:
			key.Placeholder = "NAME,..."
			key.Value = list(to, "eth0", anyText[string])
		case *policy.Namespaces:
			key.Placeholder = "NAME,..."
			key.Value = list((*[]string)(to), "kube-system", policy.ParseNamespace)
		case **policy.Ports:
			key.Placeholder = "PORTS"
			key.Value = optionalText(to, "1024-29999,32768-65535", policy.ParsePorts)
		case **policy.Mark:
			key.Placeholder = "MASK"
			key.Value = optionalText(to, "0x6000", policy.ParseMark)
		case *string: // masqChain is the only one
			key.Placeholder = "NAME"
			key.Value = text(to, policy.DefaultChain, parseChainName)
		case policy.Word:
			key.Placeholder = "VALUE"
			key.Value = oneOf(to)
		case *int:
			key.Placeholder = "N"
			key.Value = count(to, 1, policy.MaxCIDRLimit)
		}
	}
	return keys
}

func parseChainName(s string) (string, error) { return s, policy.ValidateChainName(s) }

// limitKey is the row of a key that states no policy, and that plugin entries and agent files have.
func limitKey(to *int) policy.Key {
	return policy.Key{
		Name:    "cidrLimit",
		Default: fmt.Sprint(policy.DefaultCIDRLimit),
		Help:    "most CIDRs in nonMasqueradeCIDRs and masqueradeCIDRs together",
		Sources: "each source on its own",
		Field:   to,
	}
}

// Keys is the table of the keys of a plugin entry, without those that every verb needs.
func (e *Entry) Keys() []policy.Key {
	return append(policy.Keys(&e.Policy), limitKey(&e.CIDRLimit), policy.Key{
		Name:    "requireAgentConfig",
		Default: "false",
		Help:    "ADD fails until the agent files were read once",
		Sources: "each network on its own",
		Field:   &e.RequireAgentConfig,
	})
}

// OwnPolicy is the File of values that [agent] and the agents' flags state.
const OwnPolicy = "[agent] of the reconciler's settings"

// Dialect is the agent for which the agents' files are written.
type Dialect string

// The values of agent_dialect: in a file without nonMasqueradeCIDRs, ip-masq-agent (v1) leaves
// the list to the other files; for ip-masq-agent-v2 it is empty.
const (
	DialectV1 Dialect = "v1"
	DialectV2 Dialect = "v2"
)

// AgentPolicy is the policy that [agent] and the agents' flags state beside the files.
type AgentPolicy struct {
	Policy    policy.SourcePolicy // its Chain is "" if none is stated
	CIDRLimit int                 // 0 for DefaultCIDRLimit
}

// Keys is the table of the keys that agent files and [agent] have in common.
func (a *AgentPolicy) Keys() []Key {
	rows := append(policy.Keys(&a.Policy), limitKey(&a.CIDRLimit))
	keys := keysOf(rows)
	for i, k := range rows {
		keys[i].Usage = k.Help
		if word, is := k.Field.(policy.Word); is {
			keys[i].Usage += ": " + policy.JoinOr(word.Choices())
		}
		if k.Default != "false" {
			keys[i].Usage += " (default: " + k.Default + ")"
		}
	}
	return keys
}

// Validate validates the policy on its own. The caller says whether IPv6 is enabled.
func (a AgentPolicy) Validate(d *Document, ipv6 bool) {
	s := a.Policy
	s.Chain, s.EnableIPv6 = cmp.Or(s.Chain, policy.DefaultChain), &ipv6
	d.ValidatePolicy(s, cmp.Or(a.CIDRLimit, policy.DefaultCIDRLimit))
}
