// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"github.com/google/go-cmp/cmp"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func trimmed(doc []byte) json.RawMessage { return bytes.TrimSpace(doc) }

func FuzzParseEntry(f *testing.F) {
	for _, keys := range []string{
		``, `"enableIPv6": "true", "nonMasqueradeCIDRs": ["fd00::/8", null], "dataDir": "state", "bogus": 1`,
		`"nonMasqueradeCIDRs": ["10.0.0.0/8", "10.0.0.0/8"], "masqueradeCIDRs": ["10.0.0.0/8"], "cidrLimit": 1`,
		`"toPorts": "1-7,9,100-200", "outputInterfaces": ["eth0", "wg+"], "masqChain": "BLUE", "backend": "nftables"`,
		`"sourceCIDRs": [], "masqLinkLocal": false, "randomFully": null, "a\u0000\u2028": {"b": [1, "]}\""]}`,
	} {
		f.Add(entryWith(keys))
	}
	f.Add([]byte("[\"a\\\\\", {} , [ ],{\"b\":\t1}]"))
	f.Add([]byte("\v{}"))
	f.Add([]byte("{\"name\":\"\xff\"}"))
	f.Fuzz(func(t *testing.T, doc []byte) {
		checkElements(t, doc)
		e, err := ParseEntry(doc)
		if json.Valid(doc) && bytes.Equal(doc, bytes.ToValidUTF8(doc, nil)) == errors.Is(err, ErrNotJSON) {
			t.Errorf("valid JSON, and ErrNotJSON is %t: %v", errors.Is(err, ErrNotJSON), err)
		}
		network, dataDir := ParseLenient(doc)
		if err != nil {
			checkMessage(t, err)
			return
		}
		if network != e.Network || dataDir != e.DataDir {
			t.Errorf("lenient: %q and %q, strict: %q and %q", network, dataDir, e.Network, e.DataDir)
		}
		if id := ReadNetconf(doc).Identity(); id.CNIVersion != e.CNIVersion {
			t.Errorf("lenient: version %q, strict: %q", id.CNIVersion, e.CNIVersion)
		}
		checkReencoded(t, e)
	})
}

func FuzzPluginFile(f *testing.F) {
	for _, doc := range []string{
		"", "allow_networks = ['podnet', \"bl\\u0075e\"]\ndata_dir = \"/srv/masq\"\ncni_conf_dir = \"/etc/cni\"\n",
		"allow_networks = [\n 1,\n]\ndata_dir = 1979-05-27\n[a.\"b c\"]\nx.y = inf\n[[q]]\n[[q]]\n", "a.b.c = 1\na.d = {e = 1}\n",
		"allow_networks = \"podnet\"\nallow-networks = 1\n\"\" = 2\n\"\\u0000\" = 3", "data_dir = '''\n/srv'''", "x = \xff", "\xef\xbb\xbfx=1",
	} {
		f.Add([]byte(doc))
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		if strings.Count(string(doc), ".")+strings.Count(string(doc), "{") > 200 {
			return // nesting takes the TOML decoder cubic time: a slow input is no finding
		}
		p, err := parsePluginFile("/etc/ip-masq/plugin.toml", doc)
		if !p.Present {
			t.Error("a file that was read is not present")
		}
		if !filepath.IsAbs(p.DataDir) || !filepath.IsAbs(p.CNIConfDir) {
			t.Errorf("relative directories: %q, %q", p.DataDir, p.CNIConfDir)
		}
		if err != nil {
			checkMessage(t, err)
			if p.AllowNetworks != nil {
				t.Errorf("a refused file allows %q", p.AllowNetworks)
			}
			return
		}
		for _, n := range p.AllowNetworks {
			if err := p.Admits(n); err != nil {
				t.Errorf("allows %q and does not admit it: %v", n, err)
			}
		}
	})
}

func FuzzConflist(f *testing.F) {
	for _, doc := range []string{
		`{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"bridge"},{"type":"ip-masq","nonMasqueradeCIDRs":["10.0.0.0/8"]}]}`,
		`{"cniVersions":["1.0.0","9.0.0"],"name":"podnet","disableCheck":"TRUE","plugins":[{"Type":"ip-masq"},{"type":"ip-masq","bogus":1}]}`,
		`{"cniVersion":"0.3.1","name":"podnet","type":"ip-masq","cidrLimit":6.4e1}`,
		`{"name":"podnet","loadOnlyInlinedPlugins":true}`, `{"type":"loopback"}`, `[]`, `null`, `{"name":1,"plugins":[null]}`,
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
		c, err := ParseConflist(path, doc)
		if err != nil {
			checkMessage(t, err)
			return
		}
		for _, e := range c.Entries {
			if e.Err != nil {
				checkMessage(t, e.Err)
				continue
			}
			if e.Entry.Network != c.Network || e.Entry.CNIVersion != c.CNIVersion {
				t.Errorf("entry of %q, %q in a list of %q, %q", e.Entry.Network, e.Entry.CNIVersion, c.Network, c.CNIVersion)
			}
			checkReencoded(t, e.Entry)
		}
	})
}

func FuzzSettings(f *testing.F) {
	for _, doc := range []string{
		"", wholeFile, "resync_interval = 60\nhealth_listen = '::1'\nagent.masqChain = ''\nconflist = {manage = 1}\n",
		"[agent]\nnonMasqueradeCIDRs = ['fd00::/8', 1, inf]\ncidrLimit = 0\n[agent.x]\ny = 1\n[[conflist]]\n",
		"agent = 1979-05-27\n\"agent.masqChain\" = 1\nmasqChain = 2\n[conflist]\n\"a\\u0000\" = nan\nnetwork = '/'\n",
	} {
		f.Add([]byte(doc), "agent.toPorts", "1-7")
		f.Add([]byte(doc), "agent.nonMasqueradeCIDRs", "10.0.0.0/8,\xff")
	}
	f.Fuzz(func(t *testing.T, doc []byte, key, text string) {
		if strings.Count(string(doc), ".")+strings.Count(string(doc), "{") > 200 {
			return // nesting takes the TOML decoder cubic time: a slow input is no finding
		}
		s := DefaultSettings()
		if err := s.parse("/etc/ip-masq/reconciler.toml", doc); err != nil {
			checkMessage(t, err)
			if diff := cmp.Diff(DefaultSettings(), s); diff != "" {
				t.Errorf("an error changed the settings:\n%s", diff)
			}
		}
		before := s
		if err := s.Set(key, text); err != nil {
			checkMessage(t, err)
			if diff := cmp.Diff(before, s, comparePrefixes); diff != "" {
				t.Errorf("an error changed the settings:\n%s", diff)
			}
		}
		if !filepath.IsAbs(s.DataDir) || !filepath.IsAbs(s.CNIConfDir) || s.ResyncInterval < time.Second {
			t.Errorf("accepts %+v", s)
		}
		// What a flag shows, it takes.
		var again Settings
		for i, field := range s.Fields() {
			if field.Value == "" {
				continue
			}
			if err := again.Set(field.Key, field.Value); err != nil {
				t.Errorf("%s shows %q, which is refused: %v", field.Key, field.Value, err)
			} else if got := again.Fields()[i].Value; got != field.Value {
				t.Errorf("%s shows %q for %q", field.Key, got, field.Value)
			}
		}
	})
}
