// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

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

// split is an oracle: how many plugins of a text are ours, and all it says
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
		now, changed, err := Add(was, []byte(entry))
		if err != nil || !changed {
			t.Fatal(changed, err, string(was))
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
		if n, err := Present(now); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		_, before := split(t, was)
		if n, after := split(t, now); n != 1 || !reflect.DeepEqual(before, after) {
			t.Fatalf("%d entries:\n%q\n%q", n, was, now)
		}
		if again, changed, err := Add(now, []byte(longEntry)); err != nil || changed || !bytes.Equal(again, now) {
			t.Fatal(changed, err)
		}
		if gone, changed, err := Remove(now); err != nil || !changed || !bytes.Equal(gone, was) {
			t.Fatalf("%t, %v:\n%q\n%q", changed, err, was, gone)
		}
	})
}

func TestSeveralEntriesCollapse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		was := anyList(t, `"bridge"`, `"ip-masq"`, `"ip\u002dmasq"`)
		had, before := split(t, was)
		if n, err := Present(was); n != had || err != nil {
			t.Fatal(n, had, err)
		}
		now, changed, err := Add(was, []byte(entry))
		if err != nil || changed != (had != 1) {
			t.Fatal(changed, err)
		}
		if n, after := split(t, now); n != 1 || !reflect.DeepEqual(before, after) {
			t.Fatalf("%d entries:\n%q\n%q", n, was, now)
		}
		gone, changed, err := Remove(was)
		if before.(map[string]any)["plugins"].([]any) == nil {
			if err == nil {
				t.Fatalf("removed the only plugins of %q", was)
			}
			return
		}
		if err != nil || changed != (had > 0) {
			t.Fatal(changed, err)
		}
		if n, after := split(t, gone); n != 0 || !reflect.DeepEqual(before, after) {
			t.Fatalf("%d entries:\n%q\n%q", n, was, gone)
		}
	})
}

func TestAnySingleConfigurationMakesAList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		members := anyMembers(t, keyed(t, `"name"`, `"net"`), keyed(t, `"type"`, `"bridge"`))
		was := []byte(joined(t, "{", members, "}"))
		now, err := FromConf(was, []byte(entry))
		if err != nil {
			t.Fatal(err, string(was))
		}
		if n, err := Present(now); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	})
}

// collapsed reports whether entries of ours went from a list whose name is no
// network's: libcni reads such a list and refuses it later, so nothing is put
// into it, and what is in it may be taken out.
func collapsed(had int, now config.Conflist) bool {
	return had > 0 && now.Err != nil && strings.Contains(now.Err.Error(), ": name: ")
}

// FuzzSplice holds what is made of any text against what config reads.
func FuzzSplice(f *testing.F) {
	for _, pattern := range []string{"testdata/lists/*", "testdata/confs/*"} {
		paths, err := filepath.Glob(pattern)
		if err != nil || len(paths) == 0 {
			f.Fatal(pattern, err)
		}
		for _, path := range paths {
			doc, err := os.ReadFile(path)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(doc)
		}
	}
	f.Add([]byte(`{"name":"n","plugins":[{"type":"b"}],"plugins":[{"type":"c"}]}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		if now, changed, err := Add(doc, []byte(entry)); err == nil {
			n, _ := Present(doc)
			list := loadedBy(t, "a.conflist", now)
			if !collapsed(n, list) && (list.Err != nil || len(list.Entries) != 1) {
				t.Errorf("%q: %+v", now, list)
			}
			if changed && !collapsed(n, list) && loadedBy(t, "a.conflist", doc).Err != nil {
				t.Errorf("%q was made of what config does not load: %q", now, doc)
			}
			back, _, err := Remove(now)
			if n == 0 && (err != nil || !bytes.Equal(back, doc)) {
				t.Errorf("%v: %q became %q", err, doc, back)
			}
		}
		if now, changed, err := Remove(doc); err == nil && changed {
			n, _ := Present(doc)
			if list := loadedBy(t, "a.conflist", now); !collapsed(n, list) && (list.Err != nil || len(list.Entries) != 0) {
				t.Errorf("%q: %+v", now, list)
			}
		}
		if now, err := FromConf(doc, []byte(entry)); err == nil {
			if list := loadedBy(t, "a.conflist", now); list.Err != nil || len(list.Entries) != 1 {
				t.Errorf("%q: %+v", now, list)
			}
		}
	})
}
