// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

const entry = `{"type": "ip-masq", "nonMasqueradeCIDRs": ["10.0.0.0/8"], "masqueradeCIDRs": [],
	"toPorts": "1024-65535", "randomFully": true}`

const longEntry = `{"type":"ip-masq","nonMasqueradeCIDRs":["10.0.0.0/8","172.16.0.0/12","192.168.0.0/16","198.51.100.0/24","203.0.113.0/24"]}`

func files(t *testing.T, pattern string) []string {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil || len(names) < 3 {
		t.Fatalf("%s: %d files, %v", pattern, len(names), err)
	}
	return names
}

func content(t *testing.T, path string) []byte {
	t.Helper()
	return assert.Must(os.ReadFile(path))(t)
}

// loadedBy reads a text as the verbs and the reconciler do, from a directory.
func loadedBy(t *testing.T, name string, doc []byte) config.Conflist {
	t.Helper()
	dir := t.TempDir()
	assert.NoError(t, os.WriteFile(filepath.Join(dir, name), doc, 0o600))
	c, err := config.ReadConfDir(dir)
	if err != nil || len(c.Conflists) != 1 {
		t.Fatal(c, err)
	}
	return c.Conflists[0]
}

// edited inserts the entry into a list or, if it is nil, removes all.
func edited(doc, entry []byte) ([]byte, error) { return setEntry("a.conflist", doc, entry, false) }

func listOf(path string, doc, entry []byte) ([]byte, error) { return setEntry(path, doc, entry, false) }

func count(t interface{ Fatal(...any) }, doc []byte) int {
	list := config.ParseConflist("a.conflist", doc)
	if list.Err != nil {
		t.Fatal(list.Err)
	}
	return len(list.Entries)
}

func TestInsertIntoRealLists(t *testing.T) {
	for _, path := range files(t, "testdata/lists/*.conflist") {
		name := filepath.Base(path)
		t.Run(name, func(t *testing.T) {
			was := content(t, path)
			had := count(t, was)
			now, err := edited(was, []byte(entry))
			if err != nil || bytes.Equal(was, now) != (had == 1) {
				t.Fatal(err)
			}
			golden.Check(t, "testdata/added/"+name, now)
			list := loadedBy(t, name, now)
			if list.Err != nil || len(list.Entries) != 1 || had == 0 && list.Entries[0].Err != nil {
				t.Errorf("config reads %+v", list)
			}
			if again, err := edited(now, []byte(longEntry)); err != nil || !bytes.Equal(again, now) {
				t.Error("a second time:", err)
			}
			back := assert.Must(edited(now, nil))(t)
			if had == 0 && !bytes.Equal(back, was) {
				t.Error("the removal does not give back the bytes:", cmp.Diff(string(was), string(back)))
			}
			if list := loadedBy(t, name, back); list.Err != nil || len(list.Entries) != 0 {
				t.Error(list.Err, len(list.Entries))
			}
		})
	}
}

func TestListsOfSingleConfigurations(t *testing.T) {
	for _, path := range files(t, "testdata/confs/*") {
		name := filepath.Base(path)
		doc := content(t, path)
		now, err := listOf(name, doc, []byte(entry))
		if err != nil {
			t.Fatal(name, err)
		}
		golden.Check(t, "testdata/made/"+name+"list", now)
		was, list := loadedBy(t, name, doc), loadedBy(t, "a.conflist", now)
		if list.Err != nil || list.Network != was.Network || list.CNIVersion != was.CNIVersion ||
			len(list.Entries) != 1 || list.Entries[0].Err != nil || list.Entries[0].Index != 1 {
			t.Errorf("%s: config reads %+v, of %+v", name, list, was)
		}
	}
}

func TestWhatIsRefused(t *testing.T) {
	for _, c := range []struct{ name, doc, want string }{
		{"nothing", "", "it is empty"},
		{"more behind it", `{"name":"n","plugins":[{"type":"b"}]} x`, "line 1, column 39"},
		{"a byte order mark", "\ufeff" + `{"name":"n","plugins":[{"type":"b"}]}`, "byte order mark"},
		{"no name", `{"plugins":[{"type":"b"}]}`, "name: is missing"},
		{"the last plugins count", `{"name":"n","plugins":[{"type":"b"}],"plugins":null}`, "plugins: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, err := edited([]byte(c.doc), []byte(entry))
			assert.ErrorContains(t, err, c.want)
			assert.Equal(t, "text", out, nil)
		})
	}
}

func TestEntriesThatWouldFailEveryADDAreRefused(t *testing.T) {
	doc := content(t, "testdata/lists/flannel.conflist")
	conf := content(t, "testdata/confs/bridge.conf")
	for _, c := range []struct{ entry, want string }{
		{``, "it is empty"},
		{`{"Type":"ip-masq"}`, `type: is missing; write "type": "ip-masq"`},
		{`{"type":"bridge"}`, `type: must be "ip-masq"`},
		{`{"type":"ip-masq","nonMasqueradeCIDR":[]}`, "nonMasqueradeCIDRs"},
	} {
		_, inserted := edited(doc, []byte(c.entry))
		_, made := listOf("a.conf", conf, []byte(c.entry))
		for _, err := range []error{inserted, made} {
			assert.ErrorContains(t, err, c.want)
		}
	}
}

// TestSpansOfAnotherText: where two parsers read a text differently, no other program is blamed.
func TestSpansOfAnotherText(t *testing.T) {
	list := config.ParseConflist("a.conflist", []byte(listWith("a", bareEntry)))
	list.Plugins = list.Plugins[:1]
	_, err := pluginSpans(list)
	assert.ErrorContains(t, err, "a.conflist: plugins: 2 are in the text, and 1 were read from it")
	if errors.Is(err, errChanged) {
		t.Error(err)
	}
}

func TestVerify(t *testing.T) {
	const was = `{"name":"n","x":[1, 2],"plugins":[{"type":"b"},{"type":"c"}]}`
	list := config.ParseConflist("a.conflist", []byte(was))
	around := func(plugins string) string { return `{"name":"n","x":[1, 2],"plugins":[` + plugins + `]}` }
	const bc = `{"type":"b"},{"type":"c"}`
	for _, c := range []struct {
		now     string
		entries int
		ok      bool
	}{
		{was, 0, true},
		{around(bc + `, {"type": "ip-masq"}`), 1, true},
		{around(bc + `,{"type":"ip-masq"}`), 0, false},
		{around(bc), 1, false},
		{around(bc + `,{"type":"ip-masq"},{"type":"ip-masq"}`), 1, false},
		{around(`{"type":"b"}`), 0, false}, {around(`{"type":"b"},{"type":"d"}`), 0, false}, {around(`{"type":"c"},{"type":"b"}`), 0, false},
		{"", 0, false}, {"{", 0, false}, {was[:len(was)-5], 0, false}, {was + "x", 0, false}, {single, 0, false}, {`{"name":"n","plugins":[]}`, 0, false},
	} {
		if err := verify(list, []byte(c.now), c.entries); (err == nil) != c.ok {
			t.Errorf("%s with %d: %v", c.now, c.entries, err)
		}
	}
}

func TestRemoveEntries(t *testing.T) {
	for _, c := range []struct{ plugins, want string }{
		{`[{"type":"b"}]`, `[{"type":"b"}]`},
		{`[ {"type":"ip-masq"} ,  {"type":"b"} ]`, `[ {"type":"b"} ]`},
		{`[ {"type":"ip-masq"}, {"type":"ip-masq"},	{"type":"b"} ]`, `[ {"type":"b"} ]`},
		{`[{"type":"b"} , {"type":"ip-masq"} ]`, `[{"type":"b"} ]`},
		{`[{"type":"b"},{"type":"ip-masq"} ,	{"type":"ip-masq"}]`, `[{"type":"b"}]`},
		{`[{"type":"ip-masq"},{"type":"b"},{"type":"ip-masq"},{"type":"c"}]`, `[{"type":"b"},{"type":"c"}]`},
		{`[{"type":"b","x":"ip-masq"},{"type":"ip-masq"}]`, `[{"type":"b","x":"ip-masq"}]`},
		{`[{"Type":"ip-masq","type":"b"},{"type":"\u0069p-masq"}]`, `[{"Type":"ip-masq","type":"b"}]`},
	} {
		around := func(plugins string) string { return `{"name":"n", "plugins":` + plugins + `}` }
		if out, err := edited([]byte(around(c.plugins)), nil); err != nil || string(out) != around(c.want) {
			t.Errorf("%s: %s, %v", c.plugins, out, err)
		}
	}
	for doc, want := range map[string]error{
		`{"name":"n","plugins":[{"type":"ip-masq"}]}`:                    ErrOnlyPlugin,
		`{"name":"n","plugins":[{"type":"ip-masq"},{"type":"ip-masq"}]}`: ErrOnlyPlugin,
		`{"name":"n","plugins":[{"type":"ip-masq"},{"ty`:                 config.ErrNotJSON,
	} {
		if out, err := edited([]byte(doc), nil); !errors.Is(err, want) || out != nil {
			t.Errorf("%s: %s, %v", doc, out, err)
		}
	}
}

func TestSingleConfigurationsThatAreRefused(t *testing.T) {
	for doc, want := range map[string]string{
		`{"type":"b"}`:                  "name: is missing",
		`{"name":"n"}`:                  "type: is missing",
		`{"name":"n","type":"ip-masq"}`: "is the only plugin",
	} {
		out, err := listOf("a.conf", []byte(doc), []byte(entry))
		assert.ErrorContains(t, err, want)
		assert.Equal(t, doc, out, nil)
	}
}

var (
	space  = rapid.StringMatching(`[ \t]{0,2}(\r?\n[ \t]{0,4})?`)
	scalar = rapid.SampledFrom([]string{
		"null", "true", "-0", "12345678901234567890123", "1.50e+03", `""`, `"ip-masq"`, `"plugins"`,
		`"\"]}[{,:\\"`, `"\u007b\ud83d\ude00"`, `"` + "\xff" + `"`, `"<&>` + "\u2028" + `"`,
	})
	keys = rapid.SampledFrom([]string{
		`"x"`, `"Plugins"`, `"ip\u002dmasq"`, `""`, `"\"}"`, `"NAMES"`, `"é"`, `"type "`,
	})
)

// joined writes items with commas and any white space.
func joined(t *rapid.T, open string, items []string, shut string) string {
	var b strings.Builder
	b.WriteString(open + space.Draw(t, "space"))
	for i, item := range items {
		if i > 0 {
			b.WriteString("," + space.Draw(t, "space"))
		}
		b.WriteString(item + space.Draw(t, "space"))
	}
	return b.String() + shut
}

func keyed(t *rapid.T, key, value string) string {
	return key + space.Draw(t, "space") + ":" + space.Draw(t, "space") + value
}

func anyValue(t *rapid.T, depth int) string {
	kind := rapid.IntRange(0, 3).Draw(t, "kind")
	if depth == 0 || kind < 2 {
		return scalar.Draw(t, "scalar")
	}
	var items []string
	for range rapid.IntRange(0, 3).Draw(t, "items") {
		item := anyValue(t, depth-1)
		if kind == 3 {
			item = keyed(t, keys.Draw(t, "key"), item)
		}
		items = append(items, item)
	}
	if kind == 3 {
		return joined(t, "{", items, "}")
	}
	return joined(t, "[", items, "]")
}

func anyMembers(t *rapid.T, of ...string) []string {
	for range rapid.IntRange(0, 3).Draw(t, "more") {
		of = append(of, keyed(t, keys.Draw(t, "key"), anyValue(t, 2)))
	}
	return rapid.Permutation(of).Draw(t, "order")
}

func anyPlugin(t *rapid.T, kinds ...string) string {
	key := rapid.SampledFrom([]string{`"type"`, `"Type"`, `"t\u0079pe"`}).Draw(t, "type")
	kind := rapid.SampledFrom(kinds).Draw(t, "plugin")
	return joined(t, "{", anyMembers(t, keyed(t, key, kind)), "}")
}

func anyList(t *rapid.T, kinds ...string) []byte {
	var plugins []string
	for range rapid.IntRange(1, 4).Draw(t, "plugins") {
		plugins = append(plugins, anyPlugin(t, kinds...))
	}
	key := rapid.SampledFrom([]string{`"plugins"`, `"plu\u0067ins"`}).Draw(t, "plugins")
	members := anyMembers(t, keyed(t, `"name"`, `"net"`), keyed(t, key, joined(t, "[", plugins, "]")))
	if rapid.Bool().Draw(t, "twice") {
		early := keyed(t, `"plugins"`, anyValue(t, 1))
		members = append([]string{early}, members...)
	}
	return []byte(space.Draw(t, "space") + joined(t, "{", members, "}") + space.Draw(t, "space"))
}

// split is an oracle: how many plugins of a text are ip-masq, and all it says
// besides.
func split(t interface{ Fatal(...any) }, doc []byte) (int, any) {
	var all map[string]any
	if err := json.Unmarshal(doc, &all); err != nil {
		t.Fatal(err, string(doc))
	}
	var others []any
	plugins := all["plugins"].([]any)
	for _, p := range plugins {
		kind := ""
		for key, v := range p.(map[string]any) {
			if key == "type" || strings.EqualFold(key, "type") && kind == "" {
				kind, _ = v.(string)
			}
		}
		if kind != config.PluginType {
			others = append(others, p)
		}
	}
	all["plugins"] = others
	return len(plugins) - len(others), all
}

func TestEveryOtherByteStays(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		was := anyList(t, `"bridge"`, `"portmap"`)
		now, err := edited(was, []byte(entry))
		if err != nil {
			t.Fatal(err, string(was))
		}
		front, back := 0, 0
		for front < len(was) && was[front] == now[front] {
			front++
		}
		for back < len(was) && was[len(was)-1-back] == now[len(now)-1-back] {
			back++
		}
		if front+back < len(was) {
			t.Fatalf("more than one place differs:\n%q\n%q", was, now)
		}
		if n := count(t, now); n != 1 {
			t.Fatal(n)
		}
		_, before := split(t, was)
		if n, after := split(t, now); n != 1 || !reflect.DeepEqual(before, after) {
			t.Fatalf("%d entries:\n%q\n%q", n, was, now)
		}
		if again, err := edited(now, []byte(longEntry)); err != nil || !bytes.Equal(again, now) {
			t.Fatal(err)
		}
		if gone, err := edited(now, nil); err != nil || !bytes.Equal(gone, was) {
			t.Fatalf("%v:\n%q\n%q", err, was, gone)
		}
	})
}

func TestSeveralEntriesCollapse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		was := anyList(t, `"bridge"`, `"ip-masq"`, `"ip\u002dmasq"`)
		had, before := split(t, was)
		if n := count(t, was); n != had {
			t.Fatal(n, had)
		}
		now, err := edited(was, []byte(entry))
		if err != nil || bytes.Equal(was, now) != (had == 1) {
			t.Fatal(err)
		}
		if n, after := split(t, now); n != 1 || !reflect.DeepEqual(before, after) {
			t.Fatalf("%d entries:\n%q\n%q", n, was, now)
		}
		gone, err := edited(was, nil)
		if before.(map[string]any)["plugins"].([]any) == nil {
			if err == nil {
				t.Fatalf("removed the only plugins of %q", was)
			}
			return
		}
		if err != nil || bytes.Equal(was, gone) != (had == 0) {
			t.Fatal(err)
		}
		if n, after := split(t, gone); n != 0 || !reflect.DeepEqual(before, after) {
			t.Fatalf("%d entries:\n%q\n%q", n, was, gone)
		}
	})
}

// FuzzSplice checks that config loads all texts that are written.
func FuzzSplice(f *testing.F) {
	for _, pattern := range []string{"testdata/lists/*", "testdata/confs/*"} {
		paths, err := filepath.Glob(pattern)
		if err != nil || len(paths) == 0 {
			f.Fatal(pattern, err)
		}
		for _, path := range paths {
			doc := assert.Must(os.ReadFile(path))(f)
			f.Add(doc)
		}
	}
	f.Add([]byte(`{"name":"n","plugins":[{"type":"b"}],"plugins":[{"type":"c"}]}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		loads := func(now []byte, entries int) {
			list := loadedBy(t, "a.conflist", now)
			if list.Err != nil || len(list.Entries) != entries {
				t.Errorf("%q became %q: %+v", doc, now, list)
			}
		}
		if now, err := edited(doc, []byte(entry)); err == nil {
			loads(now, 1)
			back, err := edited(now, nil)
			if count(t, doc) == 0 && (err != nil || !bytes.Equal(back, doc)) {
				t.Errorf("%v: %q became %q", err, doc, back)
			}
		}
		if now, err := edited(doc, nil); err == nil && !bytes.Equal(doc, now) {
			loads(now, 0)
		}
		if now, err := listOf("a.conf", doc, []byte(entry)); err == nil {
			loads(now, 1)
		}
	})
}
