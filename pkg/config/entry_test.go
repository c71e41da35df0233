// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var comparePrefixes = cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })

// entryWith returns an entry of network podnet with further keys.
func entryWith(keys string) []byte {
	doc := `{"cniVersion":"1.0.0","name":"podnet","type":"ip-masq"`
	if keys != "" {
		doc += "," + keys
	}
	return []byte(doc + "}")
}

func TestParseEntry(t *testing.T) {
	// An entry that states nothing.
	with := func(change func(*Entry)) Entry {
		e := Entry{
			Network: "podnet", CNIVersion: "1.0.0",
			Policy:    policy.SourcePolicy{Chain: "IP-MASQ-AGENT"},
			CIDRLimit: 64, DataDir: "/var/lib/cni/ip-masq",
		}
		change(&e)
		return e
	}
	for _, c := range []struct {
		name, keys string
		want       Entry
	}{
		{"nothing stated", ``, with(func(*Entry) {})},
		{"every policy key", strings.Join(policytest.Every(t, `"`, ":"), ","), with(func(e *Entry) {
			e.Policy = policytest.Stating(t, strings.Join(policytest.Every(t, `"`, ":"), ","))
		})},
		{"an order of ports, and a decimal mask", `"toPorts": "32768-65535,1024-29999,80", "bypassMark": "24576"`, with(func(e *Entry) {
			e.Policy.ToPorts = &policy.Ports{{First: 32768, Last: 65535}, {First: 1024, Last: 29999}, {First: 80, Last: 80}}
			e.Policy.BypassMark = new(policy.Mark(0x6000))
		})},
		{"keys of the entry itself", `"requireAgentConfig": true, "cidrLimit": 1000000, "dataDir": "//srv//masq/"`, with(func(e *Entry) {
			e.RequireAgentConfig, e.CIDRLimit, e.DataDir = true, 1_000_000, "/srv/masq"
		})},
		{"an empty list is stated", `"nonMasqueradeCIDRs": [], "masqueradeCIDRs": [], "outputInterfaces": [ ]`, with(func(e *Entry) {
			e.Policy.NonMasqueradeCIDRs, e.Policy.MasqueradeCIDRs = policytest.Prefixes(), policytest.Prefixes()
			e.Policy.OutputInterfaces = []string{}
		})},
		{"no ports are stated", `"toPorts": "", "backend": "auto"`, with(func(e *Entry) {
			e.Policy.ToPorts, e.Policy.Backend = &policy.Ports{}, policy.Auto
		})},
		{"twice is once", `"nonMasqueradeCIDRs": ["10.2.0.0/16", "10.1.0.0/16", "10.2.0.0/16"], "outputInterfaces": ["a", "a"]`, with(func(e *Entry) {
			e.Policy.NonMasqueradeCIDRs = policytest.Prefixes("10.2.0.0/16", "10.1.0.0/16")
			e.Policy.OutputInterfaces = []string{"a"}
		})},
		{"twice counts once", `"cidrLimit": 1, "nonMasqueradeCIDRs": ["10.2.0.0/16", "10.2.0.0/16"]`, with(func(e *Entry) {
			e.CIDRLimit = 1
			e.Policy.NonMasqueradeCIDRs = policytest.Prefixes("10.2.0.0/16")
		})},
		{"what the protocol adds", `
			"prevResult": {"cniVersion": "1.0.0", "a": 1, "a": 2}, "runtimeConfig": {}, "capabilities": {"x": true},
			"args": {"cni": {}}, "ipam": {"type": "host-local"}, "dns": {}, "ipMasq": true,
			"cni.dev/valid-attachments": [], "cni.dev/whatever": null`, with(func(*Entry) {})},
		{"escapes and white space", "\n\t\"mas\\u0071Chain\" :\r\n \"B\\u004cUE\"\n", with(func(e *Entry) { e.Policy.Chain = "BLUE" })},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := assert.Must(ReadNetconf(entryWith(c.keys)).Entry())(t)
			assert.Equal(t, "entry", got, c.want)
		})
	}
}

// TestKeysOfPolicy: each key is read from a plugin entry, from [agent] and from its flag. A name that is almost
// that of a key, and a value of another type, are mistakes.
func TestKeysOfPolicy(t *testing.T) {
	for _, k := range policytest.Keys() {
		for _, value := range policytest.Samples(t, k) {
			want := policytest.Stating(t, fmt.Sprintf("%q:%s", k.Name, value))
			entry, err := ReadNetconf(entryWith(fmt.Sprintf(`"masqChain":"C",%q:%s`, k.Name, value))).Entry()
			file, flag := DefaultSettings(), DefaultSettings()
			file.Agent.Policy.Chain, flag.Agent.Policy.Chain = "C", "C"
			if k.Name == "masqChain" {
				entry, err = ReadNetconf(entryWith(fmt.Sprintf("%q:%s", k.Name, value))).Entry()
			}
			err = errors.Join(err, file.parse("FILE", fmt.Appendf(nil, "[agent]\n%s = %s", k.Name, value)),
				flag.Set("agent."+k.Name, strings.NewReplacer(`"`, "", "[", "", "]", "").Replace(value)))
			again := DefaultSettings() // as another process asks for them
			again.Agent.Policy.Chain = "C"
			if err = errors.Join(err, again.SetAll(file.List())); err != nil {
				t.Errorf("%s: %s: %v", k.Name, value, err)
			}
			for where, got := range map[string]policy.SourcePolicy{
				"entry": entry.Policy, "[agent]": file.Agent.Policy, "flag": flag.Agent.Policy, "list": again.Agent.Policy,
			} {
				if !got.Equal(want) {
					t.Errorf("%s: %s: the %s states %+v", k.Name, value, where, got)
				}
			}
		}
		for _, c := range []struct{ keys, want string }{
			{fmt.Sprintf("%q: 1", k.Name[:len(k.Name)-1]), k.Name[:len(k.Name)-1] + ": is not a known key; did you mean " + k.Name + "?"},
			{fmt.Sprintf("%q: {}", k.Name), k.Name + ": {} is an object; write "},
			{fmt.Sprintf("%q: null", k.Name), k.Name + ": null is no value; write "},
		} {
			if _, err := ReadNetconf(entryWith(c.keys)).Entry(); err == nil || !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("%s: message\n%v\nwant\n%s", c.keys, err, c.want)
			}
		}
	}
}

func TestNotAnObject(t *testing.T) {
	for _, c := range []struct {
		name, doc string
		notJSON   bool
		want      string
	}{
		{"nothing", "", true, "configuration is not JSON: it is empty"},
		{"white space", " \n", true, "configuration is not JSON: it is empty"},
		{"no JSON", "cniVersion: 1.0.0", true,
			"configuration is not JSON: line 1, column 1: invalid character 'c' looking for beginning of value"},
		{"cut off", `{"name": "podnet"`, true, "configuration is not JSON: line 1, column 17: unexpected end of JSON input"},
		{"trailing data", "{}\n{}", true, "configuration is not JSON: line 2, column 1: invalid character '{' after top-level value"},
		{"trailing comma", "{\n\"name\": \"podnet\",\n}", true,
			"configuration is not JSON: line 3, column 1: invalid character '}' looking for beginning of object key string"},
		{"invalid UTF-8", "{\"name\": \"p\xffd\"}", true, "configuration is not JSON: it has invalid UTF-8"},
		{"nested without end", strings.Repeat("[", 1<<20), true, "configuration is not JSON: line 1, column 10001: invalid character '[' exceeded max depth"},
		{"a list", `[{"name": "podnet"}]`, false, "configuration is JSON, but a list; write an object, in braces"},
		{"a string", `"podnet"`, false, "configuration is JSON, but a string; write an object, in braces"},
		{"a number", `7`, false, "configuration is JSON, but a number; write an object, in braces"},
		{"a boolean", `true`, false, "configuration is JSON, but a boolean; write an object, in braces"},
		{"null", `null`, false, "configuration is JSON, but no value; write an object, in braces"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ReadNetconf([]byte(c.doc)).Entry()
			if err == nil || err.Error() != c.want {
				t.Errorf("error\n%v\nwant\n%s", err, c.want)
			}
			if errors.Is(err, ErrNotJSON) != c.notJSON {
				t.Errorf("is ErrNotJSON: %t, want %t", !c.notJSON, c.notJSON)
			}
		})
	}
}

func TestMistakesTogether(t *testing.T) {
	e, err := ReadNetconf(entryWith(`"enableIPv6": "true", "nonMasqueradeCIDRs": ["fd00::/8", null], "dataDir": "state", "bogus": 1`)).Entry()
	want := `enableIPv6: "true" is a string; write true or false; ` +
		`nonMasqueradeCIDRs[1]: null is no value; write a string such as "10.0.0.0/8", or drop the item; ` +
		`dataDir: state is relative; write an absolute path such as /var/lib/cni/ip-masq; ` +
		`bogus: is not a known key; remove it`
	if err == nil || err.Error() != want {
		t.Errorf("error\n%v\nwant\n%s", err, want)
	}
	assert.Equal(t, "a refused entry is applied in part", e, Entry{Network: "podnet", CNIVersion: "1.0.0"})
	var all *DocumentError
	if !errors.As(err, &all) || len(all.Mistakes) != 4 {
		t.Fatalf("not a DocumentError with 4 mistakes: %v", err)
	}
	for i, want := range []policy.FieldError{
		{Key: "enableIPv6", Index: -1}, {Key: "nonMasqueradeCIDRs", Index: 1, Value: "null"},
		{Key: "dataDir", Index: -1, Value: "state"}, {Key: "bogus", Index: -1},
	} {
		var got *policy.FieldError
		if !errors.As(all.Mistakes[i], &got) {
			t.Errorf("mistake %d is no FieldError: %v", i, all.Mistakes[i])
		} else if got.Key != want.Key || got.Index != want.Index || got.Value != want.Value {
			t.Errorf("mistake %d: %s[%d] %q, want %s[%d] %q", i, got.Key, got.Index, got.Value, want.Key, want.Index, want.Value)
		}
	}
}

func TestManyMistakes(t *testing.T) {
	items := strings.Repeat(`"`+strings.Repeat("é", 5000)+`",`, 5000)
	_, err := ReadNetconf(entryWith(`"nonMasqueradeCIDRs": [` + strings.TrimSuffix(items, ",") + `]`)).Entry()
	policytest.CheckMessage(t, err)
	if !strings.HasSuffix(err.Error(), "; and 4992 more") {
		t.Errorf("the mistakes that are not shown are not counted: %v", err)
	}
}

// TestBadListMemory: the author of an entry must not make the plugin need
// many times the memory of its text.
func TestBadListMemory(t *testing.T) {
	for items, want := range map[int]string{
		900_000:   `nonMasqueradeCIDRs[0]: 1 is a number; write a string such as "10.0.0.0/8"; `,
		3_000_000: "nonMasqueradeCIDRs: has 3000000 items, more than the 1000000 possible; remove some",
	} {
		t.Run(fmt.Sprint(items), func(t *testing.T) {
			entry := entryWith(`"nonMasqueradeCIDRs": [` + strings.Repeat("1,", items-1) + "1]")
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := ReadNetconf(entry).Entry()
			runtime.ReadMemStats(&after)
			policytest.CheckMessage(t, err)
			if err == nil || !strings.HasPrefix(err.Error(), want) {
				t.Errorf("got %v, want %s", err, want)
			}
			const most = 250 // of which 120 go for finding the items
			if each := (after.TotalAlloc - before.TotalAlloc) / uint64(items); each > most {
				t.Errorf("takes %d bytes for each item, more than %d", each, most)
			}
		})
	}
}

// A million entries take seconds; with a step that is quadratic, an hour.
func TestHugeLists(t *testing.T) {
	const most, many = 1_000_000, 200_000
	list := func(n int, item func(i int) string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "%q,", item(i))
		}
		return "[" + strings.TrimSuffix(b.String(), ",") + "]"
	}
	host := func(i int) string { return fmt.Sprintf("10.%d.%d.%d/32", i>>16, i>>8&255, i&255) }
	start := time.Now()
	e, err := ReadNetconf(entryWith(`"cidrLimit": 1000000, "nonMasqueradeCIDRs": ` + list(most, host))).Entry()
	if err != nil || len(e.Policy.NonMasqueradeCIDRs) != most {
		t.Errorf("a million prefixes: %d, %v", len(e.Policy.NonMasqueradeCIDRs), err)
	}
	e, err = ReadNetconf(entryWith(`"nonMasqueradeCIDRs": ` + list(many, func(int) string { return "10.0.0.0/8" }))).Entry()
	if err != nil || len(e.Policy.NonMasqueradeCIDRs) != 1 {
		t.Errorf("one prefix many times: %d, %v", len(e.Policy.NonMasqueradeCIDRs), err)
	}
	both := list(many, host)
	_, err = ReadNetconf(entryWith(`"cidrLimit": 1000000, "nonMasqueradeCIDRs": ` + both + `, "masqueradeCIDRs": ` + both)).Entry()
	policytest.CheckMessage(t, err)
	_, err = ReadNetconf(entryWith(`"outputInterfaces": ` + list(many, func(i int) string { return fmt.Sprintf("%d:", i) }))).Entry()
	policytest.CheckMessage(t, err)
	var keys strings.Builder
	for i := range many {
		fmt.Fprintf(&keys, `"k%d": 1,`, i)
	}
	_, err = ReadNetconf(entryWith(strings.TrimSuffix(keys.String(), ","))).Entry()
	policytest.CheckMessage(t, err)
	if d := time.Since(start); timelimit.Exceeded(d, time.Minute) {
		t.Errorf("took %s", d)
	}
}

func TestIdentity(t *testing.T) {
	for _, c := range []struct{ name, doc, network, dataDir string }{
		{"sound", `{"name":"podnet","dataDir":"/srv/masq"}`, "podnet", "/srv/masq"},
		{"slashes without meaning", `{"name":"podnet","dataDir":"/srv//masq/"}`, "podnet", "/srv/masq"},
		{"no dataDir", `{"name":"podnet"}`, "podnet", DefaultDataDir},
		{"bad in all else", `{"name":"podnet","dataDir":"/srv/masq","bogus":1,"enableIPv6":3,"nonMasqueradeCIDRs":null,"bogus":2}`, "podnet", "/srv/masq"},
		{"relative dataDir", `{"name":"podnet","dataDir":"srv"}`, "podnet", DefaultDataDir},
		{"dataDir of another type", `{"name":"podnet","dataDir":null}`, "podnet", DefaultDataDir},
		{"the last of two", `{"name":"a","name":"b"}`, "b", DefaultDataDir},
		{"bad name", `{"name":"../podnet","dataDir":"/srv/masq"}`, "", "/srv/masq"},
		{"name of another type", `{"name":{"a":1}}`, "", DefaultDataDir},
		{"no name", `{}`, "", DefaultDataDir},
		{"no object", `["name"]`, "", DefaultDataDir},
		{"no JSON", `{"name":"podnet"`, "", DefaultDataDir},
		{"empty", ``, "", DefaultDataDir},
	} {
		t.Run(c.name, func(t *testing.T) {
			if id := ReadNetconf([]byte(c.doc)).Identity(); id.Network != c.network || id.DataDir != c.dataDir {
				t.Errorf("%q, %q; want %q, %q", id.Network, id.DataDir, c.network, c.dataDir)
			}
		})
	}
}

// TestPolicyTexts: keys that state no policy leave the texts as they were, and make the same
// entry; all others change the texts.
func TestPolicyTexts(t *testing.T) {
	const base = `{"cniVersion":"1.1.0","name":"podnet","type":"ip-masq","nonMasqueradeCIDRs":["10.0.0.0/8"],"prevResult":{"a":1},"runtimeConfig":{}}`
	texts := func(doc string) []string { return ReadNetconf([]byte(doc)).PolicyTexts() }
	with := func(old, replaced string) string {
		if !strings.Contains(base, old) {
			t.Fatalf("%s is not there", old)
		}
		return strings.Replace(base, old, replaced, 1)
	}
	entry := assert.Must(ReadNetconf([]byte(base)).Entry())(t)
	for _, doc := range []string{
		with(`{"a":1}`, `{"cniVersion":"1.0.0","ips":[]}`), with(`"runtimeConfig":{}`, `"runtimeConfig":{"portMappings":[{}]}`),
		with(`"prevResult":{"a":1}`, `"prev\u0052esult" : null`), with(`,"name"`, " ,\n\t\"name\""), " " + base + "\n",
	} {
		assert.Equal(t, fmt.Sprintf("%s\nhas other texts", doc), texts(doc), texts(base))
		if same, err := ReadNetconf([]byte(doc)).Entry(); err != nil || !same.Policy.Equal(entry.Policy) {
			t.Errorf("%s\nis another entry: %v", doc, err)
		}
	}
	for _, doc := range []string{
		with(`10.0.0.0/8`, `10.0.0.0/9`), with(`"podnet"`, `"othernet"`), with(`1.1.0`, `1.0.0`), with(`"type"`, `"bogus":1,"type"`),
		with(`"prevResult"`, `"prevResult":1,"prevResult"`), with(`"runtimeConfig":{}`, `"requireAgentConfig":true`), `{}`, `[]`, ``,
	} {
		if cmp.Equal(texts(base), texts(doc)) {
			t.Errorf("%s\nhas the same texts", doc)
		}
	}
}

func trimmed(doc []byte) json.RawMessage { return bytes.TrimSpace(doc) }

func FuzzParseEntry(f *testing.F) {
	for _, keys := range []string{
		``, `"enableIPv6": "true", "nonMasqueradeCIDRs": ["fd00::/8", null], "dataDir": "state", "bogus": 1`,
		`"nonMasqueradeCIDRs": ["10.0.0.0/8", "10.0.0.0/8"], "masqueradeCIDRs": ["10.0.0.0/8"], "cidrLimit": 1`,
		`"toPorts": "1-7,9,100-200", "outputInterfaces": ["eth0", "wg+"], "masqChain": "BLUE", "backend": "nftables"`,
		`"podCIDRs": ["10.0.0.0/8"], "guard": "drop", "staleConnections": "keep", "enforceExempt": true, "bypassMark": "0x4000"`,
		`"sourceCIDRs": [], "masqLinkLocal": false, "randomFully": null, "a\u0000\u2028": {"b": [1, "]}\""]}`,
	} {
		f.Add(entryWith(keys))
	}
	f.Add([]byte("[\"a\\\\\", {} , [ ],{\"b\":\t1}]"))
	f.Add([]byte("\v{}"))
	f.Add([]byte("{\"name\":\"\xff\"}"))
	f.Fuzz(func(t *testing.T, doc []byte) {
		checkElements(t, doc)
		e, err := ReadNetconf(doc).Entry()
		if json.Valid(doc) && bytes.Equal(doc, bytes.ToValidUTF8(doc, nil)) == errors.Is(err, ErrNotJSON) {
			t.Errorf("valid JSON, and ErrNotJSON is %t: %v", errors.Is(err, ErrNotJSON), err)
		}
		if err != nil {
			policytest.CheckMessage(t, err)
			return
		}
		if id := ReadNetconf(doc).Identity(); id.Network != e.Network || id.DataDir != e.DataDir || id.CNIVersion != e.CNIVersion {
			t.Errorf("identity %+v of entry %+v", id, e)
		}
		checkReencoded(t, e)
	})
}

// encode writes an entry as a conflist would have it.
func encode(t testing.TB, e Entry) []byte {
	t.Helper()
	stated := assert.Must(json.Marshal(e.Policy))(t)
	var doc map[string]any
	assert.NoError(t, json.Unmarshal(stated, &doc))
	doc["name"], doc["cniVersion"], doc["type"] = e.Network, e.CNIVersion, PluginType
	doc["requireAgentConfig"], doc["cidrLimit"], doc["dataDir"] = e.RequireAgentConfig, e.CIDRLimit, e.DataDir
	return assert.Must(json.Marshal(doc))(t)
}

// checkReencoded parses what an accepted entry is written as.
func checkReencoded(t testing.TB, e Entry) {
	t.Helper()
	again, err := ReadNetconf(encode(t, e)).Entry()
	if err != nil {
		t.Fatalf("an accepted entry is refused once it is encoded again: %v\n%s", err, encode(t, e))
	}
	assert.Equal(t, "entry changed when it was encoded again", again, e)
}

func TestEntryEncoding(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		checkReencoded(t, Entry{
			Network: "podnet", CNIVersion: "1.1.0", Policy: policytest.Any().SourcePolicy(rt),
			RequireAgentConfig: rapid.Bool().Draw(rt, "requireAgentConfig"),
			CIDRLimit:          rapid.IntRange(18, policy.MaxCIDRLimit).Draw(rt, "cidrLimit"),
			DataDir:            "/srv/" + rapid.StringMatching(`[a-z0-9_+@-]{1,20}`).Draw(rt, "dataDir"),
		})
	})
}

// elements does what the decoder of the standard library does.
func checkElements(t testing.TB, doc []byte) {
	t.Helper()
	var items []json.RawMessage
	if json.Unmarshal(doc, &items) == nil && items != nil {
		assert.Equal(t, fmt.Sprintf("items of %q", doc), append([]json.RawMessage{}, elements(trimmed(doc))...), items)
	}
	var values map[string]json.RawMessage
	if json.Unmarshal(doc, &values) == nil && values != nil {
		got := map[string]json.RawMessage{}
		parts := elements(trimmed(doc))
		for pair := range slices.Chunk(parts, 2) {
			name, isString := stringValue(pair[0])
			if !isString {
				t.Fatalf("%q has a key that is no string: %q", doc, pair[0])
			}
			got[name] = pair[1]
		}
		assert.Equal(t, fmt.Sprintf("members of %q", doc), got, values)
	}
}
