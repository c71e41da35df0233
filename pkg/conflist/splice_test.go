// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

func TestWhatIsRefused(t *testing.T) {
	deep := strings.Repeat("[", 10001) + strings.Repeat("]", 10001)
	for _, c := range []struct{ name, doc, want string }{
		{"nothing", "", "it is empty"},
		{"blank", " \n", "it is empty"},
		{"half a file", `{"name":"n","plugins":[{"type":"br`, "line 1, column"},
		{"more behind it", `{"name":"n","plugins":[{"type":"b"}]} x`, "line 1, column 39"},
		{"a byte order mark", "\ufeff" + `{"name":"n","plugins":[{"type":"b"}]}`, "byte order mark"},
		{"a list", `[]`, "is not an object"},
		{"null", `null`, "is not an object"},
		{"no name", `{"plugins":[{"type":"b"}]}`, "name: is missing"},
		{"a name of another kind", `{"name":5,"plugins":[{"type":"b"}]}`, "name: "},
		{"a null name", `{"name":null,"plugins":[{"type":"b"}]}`, "name: "},
		{"no network's name", `{"name":"a/b","plugins":[{"type":"b"}]}`, "name: "},
		{"a version of another kind", `{"name":"n","cniVersion":1,"plugins":[{"type":"b"}]}`, "cniVersion: "},
		{"bad versions", `{"name":"n","cniVersions":["x"],"plugins":[{"type":"b"}]}`, `"x" is not a version`},
		{"a bad switch", `{"name":"n","disableGC":1,"plugins":[{"type":"b"}]}`, "disableGC: "},
		{"plugins in a folder", `{"name":"n"}`, "no plugins of its own"},
		{"no plugins at all", `{"name":"n","loadOnlyInlinedPlugins":true}`, "plugins: is empty or missing"},
		{"an empty list", `{"name":"n","plugins":[]}`, "plugins: is empty or missing"},
		{"plugins of another kind", `{"name":"n","plugins":{"type":"b"}}`, "plugins: "},
		{"the last plugins count", `{"name":"n","plugins":[{"type":"b"}],"plugins":null}`, "plugins: "},
		{"a plugin without a type", `{"name":"n","plugins":[{"type":"b"},{}]}`, "plugins[1]: type: is missing"},
		{"a plugin that is null", `{"name":"n","plugins":[null]}`, "plugins[0]: "},
		{"too deep", `{"name":"n","plugins":[{"type":"b"}],"x":` + deep + `}`, "not JSON"},
		{"too large", `{"name":"n","plugins":[{"type":"b"}]}` + strings.Repeat(" ", 1<<20), "larger than 1024 KiB"},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, changed, err := Add([]byte(c.doc), []byte(entry))
			if err == nil || !strings.Contains(err.Error(), c.want) || out != nil || changed {
				t.Errorf("Add: %q, %t, %v", out, changed, err)
			}
		})
	}
}

func TestEntriesThatWouldFailEveryADDAreRefused(t *testing.T) {
	doc := content(t, "testdata/lists/flannel.conflist")
	conf := content(t, "testdata/confs/bridge.conf")
	for _, c := range []struct{ entry, want string }{
		{``, "it is empty"},
		{`[]`, "is not an object"},
		{`{"type":"ip-masq"} {}`, "not JSON"},
		{`{"Type":"ip-masq"}`, `type: must be "ip-masq"`},
		{`{"type":"bridge"}`, `type: must be "ip-masq"`},
		{`{"type":"ip-masq","nonMasqueradeCIDR":[]}`, "nonMasqueradeCIDRs"},
		{`{"type":"ip-masq","nonMasqueradeCIDRs":["10.0.1.24/24"]}`, "did you mean 10.0.1.0/24?"},
	} {
		for name, err := range map[string]error{
			"Add":      func() error { _, _, err := Add(doc, []byte(c.entry)); return err }(),
			"FromConf": func() error { _, err := FromConf(conf, []byte(c.entry)); return err }(),
		} {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s of %s: %v", name, c.entry, err)
			}
		}
	}
}

func TestAnEntryThatIsThereIsLeftAloneWhateverIsToBeAdded(t *testing.T) {
	doc := []byte(`{"name":"n","plugins":[{"tYPE":"ip-masq","bad":1},{"type":"b"}]}`)
	out, changed, err := Add(doc, []byte(`no entry`))
	if err != nil || changed || !bytes.Equal(out, doc) {
		t.Error(string(out), changed, err)
	}
}

func TestRemove(t *testing.T) {
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
		out, changed, err := Remove([]byte(around(c.plugins)))
		if err != nil || changed != (c.plugins != c.want) || string(out) != around(c.want) {
			t.Errorf("%s: %s, %t, %v", c.plugins, out, changed, err)
		}
	}
	for doc, want := range map[string]error{
		`{"name":"n","plugins":[{"type":"ip-masq"}]}`:                    ErrOnlyPlugin,
		`{"name":"n","plugins":[{"type":"ip-masq"},{"type":"ip-masq"}]}`: ErrOnlyPlugin,
		`{"name":"n","plugins":[{"type":"ip-masq"},{"ty`:                 config.ErrNotJSON,
	} {
		if out, changed, err := Remove([]byte(doc)); !errors.Is(err, want) || out != nil || changed {
			t.Errorf("%s: %s, %t, %v", doc, out, changed, err)
		}
	}
	folder := []byte(`{"name":"n"}`)
	if out, changed, err := Remove(folder); err != nil || changed || !bytes.Equal(out, folder) {
		t.Error(string(out), changed, err)
	}
}

func TestFromConfRefuses(t *testing.T) {
	for doc, want := range map[string]string{
		`{"type":"b"}`:                  "name: is missing",
		`{"name":"n"}`:                  "type: is missing",
		`{"name":"n","type":"ip-masq"}`: "ours is the only plugin",
		`{"name":"n","type":5}`:         "write what the CNI specification has there",
		`{"name":"n","type":"b"`:        "line 1, column",
		`["n"]`:                         "is not an object",
	} {
		if out, err := FromConf([]byte(doc), []byte(entry)); err == nil || !strings.Contains(err.Error(), want) || out != nil {
			t.Errorf("%s: %s, %v", doc, out, err)
		}
	}
}

func TestVersionsOfLists(t *testing.T) {
	for doc, want := range map[string]string{
		`{"name":"n"}`:                      "",
		`{"name":"n","cniVersion":"0.4.0"}`: "0.4.0",
		`{"name":"n","cniVersion":"0.4.0","cniVersions":["0.3.1","1.0.0","9.0.0"]}`: "1.0.0",
		`{"name":"n","cniVersions":["9.0.0"]}`:                                      "",
		`{"name":"n","cniVersion":"1.0.0","cniVersions":["0.3.1"]}`:                 "1.0.0",
	} {
		if l, err := parseList([]byte(doc)); err != nil || l.cniVersion != want {
			t.Errorf("%s: %q, %v", doc, l.cniVersion, err)
		}
	}
}
