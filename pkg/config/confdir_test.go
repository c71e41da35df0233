// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// confDir makes a directory with files of these names.
func confDir(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		write(t, filepath.Join(dir, name), text)
	}
	return dir
}

func read(t testing.TB, dir string) ConfDir {
	t.Helper()
	return assert.Must(ReadConfDir(dir))(t)
}

func TestReadConfDir(t *testing.T) {
	dir := confDir(t, map[string]string{
		"20-second.conflist": `{"cniVersion": "1.0.0", "name": "second", "plugins": [
			{"type": "bridge", "isGateway": true},
			{"type": "ip-masq", "name": "overruled", "cniVersion": "0.1.0", "masqChain": "SECOND"},
			{"type": "ip-masq", "bogus": 1}]}`,
		"10-first.conflist": `{"cniVersion": "0.4.0", "name": "first", "plugins": [{"type": "ptp"}]}`,
		"15-alone.conf":     `{"cniVersion": "0.3.1", "name": "alone", "type": "ip-masq", "dataDir": "/srv/masq"}`,
		"16-other.json":     `{"cniVersion": "0.3.1", "name": "other", "type": "macvlan"}`,
		"99-loopback.conf":  `{"type": "loopback"}`,
		"30-broken.conflist": `{"name": "broken",
			"plugins": [`,
		"notes.txt": "no configuration", "10-first.conflist.bak": "{", "nested.conflist/x": "{",
	})
	own := func(network, version string) Entry {
		return Entry{
			Network: network, CNIVersion: version, Policy: policy.SourcePolicy{Chain: policy.DefaultChain},
			CIDRLimit: policy.DefaultCIDRLimit, DataDir: DefaultDataDir,
		}
	}
	alone, second := own("alone", "0.3.1"), own("second", "1.0.0")
	alone.DataDir = "/srv/masq"
	second.Policy.Chain = "SECOND"
	file := func(name string) string { return filepath.Join(dir, name) }
	want := []Conflist{
		{File: file("10-first.conflist"), Network: "first", CNIVersion: "0.4.0", Types: []string{"ptp"}},
		{File: file("15-alone.conf"), Network: "alone", CNIVersion: "0.3.1", Types: []string{"ip-masq"}, Entries: []ConflistEntry{{Entry: alone}}},
		{File: file("16-other.json"), Network: "other", CNIVersion: "0.3.1", Types: []string{"macvlan"}},
		{File: file("20-second.conflist"), Network: "second", CNIVersion: "1.0.0", Types: []string{"bridge", "ip-masq", "ip-masq"}, Entries: []ConflistEntry{
			{Index: 1, Entry: second},
			{Index: 2, Entry: Entry{Network: "second", CNIVersion: "1.0.0"},
				Err: errors.New(file("20-second.conflist") + ": plugins[2]: bogus: is not a known key; remove it")},
		}},
		{File: file("30-broken.conflist"),
			Err: errors.New(file("30-broken.conflist") + ": configuration is not JSON: line 2, column 15: unexpected end of JSON input")},
		{File: file("99-loopback.conf"), Types: []string{"loopback"}},
	}
	sameText := cmp.Comparer(func(a, b error) bool { return a == nil && b == nil || a != nil && b != nil && a.Error() == b.Error() })
	c := read(t, dir)
	assert.Equal(t, "the directory", c, ConfDir{Dir: dir, Conflists: want, Changed: c.Changed}, sameText, cmpopts.IgnoreFields(ConflistEntry{}, "Netconf"), cmpopts.IgnoreFields(Conflist{}, "Doc", "Plugins"))
	policytest.WantError(t, c.Err(), dir, "FILE/30-broken.conflist: configuration is not JSON: line 2, column 15: unexpected end of JSON input")
	for network, named := range map[string]bool{
		"second": true, "alone": true, "first": false, "other": false, "broken": false, "overruled": false, "": false,
	} {
		assert.Equal(t, fmt.Sprintf("names %q", network), c.HasEntry(network), named)
	}
	if !c.HasEntryWith("second", second.Policy) || c.HasEntryWith("second", alone.Policy) {
		t.Error("the policy of network second is not that of its first entry")
	}
	if c.HasEntryWith("first", policy.SourcePolicy{}) {
		t.Error("a network without an entry has a policy")
	}
}

func TestPolicyOfInvalidEntry(t *testing.T) {
	c := read(t, confDir(t, map[string]string{
		"10-a.conflist": `{"name": "podnet", "plugins": [{"type": "ip-masq", "enableIPv6": "true"}]}`,
		"20-b.conflist": `{"name": "podnet", "plugins": [{"type": "ip-masq"}]}`,
		"05-c.conflist": `{"name": "podnet", "plugins": [{"type": "bridge"}]}`,
	}))
	if !c.HasEntry("podnet") {
		t.Error("a network whose entry is refused is not named")
	}
	if c.HasEntryWith("podnet", policy.SourcePolicy{}) || c.HasEntryWith("podnet", policy.SourcePolicy{Chain: policy.DefaultChain}) {
		t.Error("an invalid entry has a policy")
	}
	if err := c.Err(); err != nil {
		t.Errorf("a refused entry makes a file one that runtimes cannot load: %v", err)
	}
}

func TestNoConfDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "net.d")
	c, err := ReadConfDir(dir)
	if !errors.Is(err, os.ErrNotExist) || len(c.Conflists) > 0 {
		t.Errorf("a missing directory: %+v, %v", c, err)
	}
	policytest.WantError(t, err, dir, "read the CNI configuration directory FILE: no such file or directory")
	_, err = ReadConfDir(write(t, dir, ""))
	policytest.WantError(t, err, dir, "read the CNI configuration directory FILE: not a directory")
	if errors.Is(err, os.ErrNotExist) {
		t.Error("a file in place of the directory counts as missing")
	}
	if c := read(t, t.TempDir()); len(c.Conflists) > 0 || c.Err() != nil {
		t.Errorf("an empty directory: %+v", c)
	}
}

func TestUnloadableConfFiles(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"x.conflist", ``, `FILE: configuration is not JSON: it is empty`},
		{"x.conflist", `[]`, `FILE: is array; write an object, in braces`},
		{"x.conflist", `{"plugins": [{"type": "bridge"}]}`, `FILE: name: is missing; name the network, such as "podnet"`},
		{"x.conflist", `{"name": "../etc", "plugins": [{"type": "bridge"}]}`,
			`FILE: name: ../etc is not the name of a network; write letters, digits, '_', '.' and '-', the first a letter or a digit`},
		{"x.conflist", `{"name": "podnet"}`, `FILE: plugins: is missing; write a list of plugin configurations`},
		{"x.conflist", `{"name": "podnet", "plugins": []}`, `FILE: plugins: is empty; write at least one plugin configuration`},
		{"x.conflist", `{"name": "podnet", "plugins": {"type": "bridge"}}`,
			`FILE: plugins: "{\"type\": \"bridge\"}" is an object; write a list of plugin configurations`},
		{"x.conflist", `{"name": "podnet", "plugins": [{"type": "ip-masq"}, {"typ": "bridge"}, 7]}`,
			`FILE: plugins[1]: type: is missing; write the name of a plugin, such as "bridge", or rename a list to .conflist; FILE: plugins[2]: is number; write an object, in braces`},
		{"x.conflist", `{"name": "podnet", "plugins": [{"type": "ip-masq", "capabilities": {"a": 1}}]}`,
			`FILE: plugins[0]: capabilities: is number; write what the CNI specification has there`},
		{"x.conf", `{"name": "podnet", "plugins": [{"type": "ip-masq"}]}`,
			`FILE: type: is missing; write the name of a plugin, such as "bridge", or rename a list to .conflist`},
		{"x.json", `{"name": "podnet"}`, `FILE: type: is missing; write the name of a plugin, such as "bridge", or rename a list to .conflist`},
		{"x.conflist", strings.Repeat(" ", 1<<20) + "{", "read FILE: larger than 1024 KiB"},
	} {
		t.Run(c.name+" "+c.text[:min(len(c.text), 60)], func(t *testing.T) {
			dir := confDir(t, map[string]string{c.name: c.text, "z.conflist": `{"name": "sound", "plugins": [{"type": "ip-masq"}]}`})
			list := read(t, dir).Conflists
			if len(list) != 2 || !read(t, dir).HasEntry("sound") {
				t.Fatalf("the broken file hides the other: %+v", list)
			}
			policytest.WantError(t, list[0].Err, filepath.Join(dir, c.name), c.want)
			if list[0].Entries != nil || read(t, dir).HasEntry("podnet") {
				t.Errorf("what cannot be loaded has entries: %+v", list[0].Entries)
			}
		})
	}
}

// What libcni makes of a list before a plugin sees it.
func TestConflistEntries(t *testing.T) {
	const entry = `{"type": "ip-masq"}`
	for _, c := range []struct{ what, text, version, chain string }{
		{"no version", `{"name": "podnet", "plugins": [` + entry + `]}`, "", policy.DefaultChain},
		{"a choice of versions", `{"name": "podnet", "cniVersion": "0.4.0", "cniVersions": ["0.3.1", "1.0.0", "99.0.0"], "plugins": [` + entry + `]}`,
			"0.4.0", policy.DefaultChain},
		{"the last of two keys", `{"name": "old", "name": "podnet", "plugins": [{"type": "ip-masq", "masqChain": "A", "masqChain": "B"}]}`, "", "B"},
		{"numbers in Go's form", `{"name": "podnet", "plugins": [{"type": "ip-masq", "cidrLimit": 6.4e1}]}`, "", policy.DefaultChain},
	} {
		t.Run(c.what, func(t *testing.T) {
			list := read(t, confDir(t, map[string]string{"x.conflist": c.text})).Conflists[0]
			if list.Err != nil || len(list.Entries) != 1 || list.Entries[0].Err != nil {
				t.Fatalf("%+v", list)
			}
			e := list.Entries[0].Entry
			if e.Network != "podnet" || e.CNIVersion != c.version || list.CNIVersion != c.version || e.Policy.Chain != c.chain {
				t.Errorf("network %q, version %q, chain %q", e.Network, e.CNIVersion, e.Policy.Chain)
			}
		})
	}
}

func TestIrregularConfFiles(t *testing.T) {
	dir := confDir(t, map[string]string{
		"real":       `{"name": "linked", "plugins": [{"type": "ip-masq"}]}`,
		"z.conflist": `{"name": "sound", "plugins": [{"type": "ip-masq"}]}`,
	})
	for _, name := range []string{"a.conflist", "b.conf"} {
		assert.NoError(t, syscall.Mkfifo(filepath.Join(dir, name), 0o600))
	}
	for link, target := range map[string]string{"c.conflist": "/dev/zero", "d.conflist": "gone", "e.conflist": "real", "f.conflist": "."} {
		assert.NoError(t, os.Symlink(target, filepath.Join(dir, link)))
	}
	c := read(t, dir)
	if !c.HasEntry("sound") || !c.HasEntry("linked") {
		t.Errorf("%+v", c)
	}
	want := "read FILE/a.conflist: not a regular file; read FILE/b.conf: not a regular file; read FILE/c.conflist: not a regular file; " +
		"open FILE/d.conflist: not a regular file: it is a symlink to what is not there; in a container, mount the directory it points to as well; read FILE/f.conflist: not a regular file"
	policytest.WantError(t, c.Err(), dir, want)
}

func FuzzConflist(f *testing.F) {
	for _, doc := range []string{
		`{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"bridge"},{"type":"ip-masq","nonMasqueradeCIDRs":["10.0.0.0/8"]}]}`,
		`{"cniVersions":["1.0.0","9.0.0"],"name":"podnet","disableCheck":"TRUE","plugins":[{"Type":"ip-masq"},{"type":"ip-masq","bogus":1}]}`,
		`{"cniVersion":"0.3.1","name":"podnet","type":"ip-masq","cidrLimit":6.4e1}`,
		`{"name":"podnet"}`, `{"type":"loopback"}`, `[]`, `null`, `{"name":1,"plugins":[null]}`,
		`{"name":"podnet","plugins":[{"type":"x","capabilities":{"\u2028":1}}]}`,
	} {
		f.Add(true, []byte(doc))
		f.Add(false, []byte(doc))
	}
	f.Fuzz(func(t *testing.T, isList bool, doc []byte) {
		path := "/etc/cni/net.d/10-podnet.conf"
		if isList {
			path += "list"
		}
		c := ParseConflist(path, doc)
		if c.Err != nil {
			policytest.CheckMessage(t, c.Err)
			return
		}
		for _, e := range c.Entries {
			if e.Err != nil {
				policytest.CheckMessage(t, e.Err)
				continue
			}
			if e.Entry.Network != c.Network || e.Entry.CNIVersion != c.CNIVersion {
				t.Errorf("entry of %q, %q in a list of %q, %q", e.Entry.Network, e.Entry.CNIVersion, c.Network, c.CNIVersion)
			}
			checkReencoded(t, e.Entry)
		}
	})
}

// TestVersionErr: a version that the plugin does not know fails every ADD, unless the runtime chooses another one.
func TestVersionErr(t *testing.T) {
	const entry = `{"type": "bridge"}, {"type": "ip-masq"}`
	for name, c := range map[string]struct {
		list  string
		fails bool
	}{
		"the newest":           {`"cniVersion": "1.1.0", "plugins": [` + entry + `]`, false},
		"the oldest":           {`"cniVersion": "0.1.0", "plugins": [` + entry + `]`, false},
		"none":                 {`"plugins": [` + entry + `]`, false},
		"a newer one":          {`"cniVersion": "1.2.0", "plugins": [` + entry + `]`, true},
		"two parts":            {`"cniVersion": "1.0", "plugins": [` + entry + `]`, true},
		"a letter before":      {`"cniVersion": "v1.0.0", "plugins": [` + entry + `]`, true},
		"a list of versions":   {`"cniVersion": "1.2.0", "cniVersions": ["1.0.0", "1.2.0"], "plugins": [` + entry + `]`, false},
		"without our own type": {`"cniVersion": "1.2.0", "plugins": [{"type": "bridge"}]`, false},
	} {
		list := ParseConflist("10-a.conflist", []byte(`{"name": "a", `+c.list+`}`))
		if err := list.VersionErr(); list.Err != nil || (err != nil) != c.fails {
			t.Errorf("%s: %v %v", name, list.Err, err)
		}
	}
}
