// SPDX-License-Identifier: Apache-2.0

package install

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// multusDir is where Multus reads the configurations of networks that a pod asks for
// by name.
const multusDir = "/etc/cni/multus/net.d"

// Copy is a file that names the plugin without being a conflist with a plugin entry of
// its own, such as the configuration that Multus generates of a conflist.
type Copy struct {
	File string `json:"file"`
	// Loaded says that a runtime or a plugin may read it: its name ends as theirs do.
	Loaded bool `json:"loaded"`

	multus bool // Multus generated it, or its owner wrote it for Multus
}

// copies returns the files of configuration directories, and of the directories in
// them, that name the plugin at any depth.
func copies(dirs []string) ([]Copy, error) {
	const deepest, most = 4, 10000
	var found []Copy
	var errs []error
	for _, dir := range dirs {
		count := 0
		err := filepath.WalkDir(dir+"/", func(path string, e fs.DirEntry, err error) error {
			switch {
			case errors.Is(err, fs.ErrNotExist):
				return nil
			case err != nil:
				return safefile.Error("read the directory", path, err)
			case e.IsDir() && strings.Count(strings.TrimPrefix(path, dir), "/") > deepest:
				return fs.SkipDir
			case e.IsDir():
				return nil
			}
			if count++; count > most {
				return fmt.Errorf("%s has more than %d files", policy.Printable(dir), most)
			}
			value, _, err := readJSON(path)
			if err == nil && names(value, 0) {
				loaded := slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(path))
				found = append(found, Copy{path, loaded, isMultus(value)})
			}
			if errors.Is(err, errNotJSON) || errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
			errs = append(errs, err)
			return nil
		})
		errs = append(errs, err)
	}
	return found, errors.Join(errs...)
}

// isMultus reports whether a configuration, or the first of a list, is one of Multus.
func isMultus(value any) bool {
	members, _ := value.(map[string]any)
	if plugins, _ := members["plugins"].([]any); len(plugins) > 0 {
		members, _ = plugins[0].(map[string]any)
	}
	kind, _ := members["type"].(string)
	return config.IsMultus(kind)
}

// errNotJSON says that no runtime can read a file as a configuration.
var errNotJSON = errors.New("is no JSON")

// readJSON reads a regular file whole. What Go's decoder refuses, as for its depth,
// no runtime and no plugin reads.
func readJSON(path string) (value any, info fs.FileInfo, err error) {
	const most = 8 << 20
	text, info, err := safefile.ReadFile(path, most)
	if errors.Is(err, safefile.ErrIrregular) || err == nil && json.Unmarshal(text, &value) != nil {
		err = errNotJSON
	}
	return value, info, err
}

// names reports whether a plugin configuration in a JSON value, at any depth, is that of
// the plugin. Caches have configurations as they are, or in base64.
func names(value any, layers int) bool {
	const most = 4
	switch v := value.(type) {
	case map[string]any:
		for key, member := range v {
			if s, ok := member.(string); ok && s == config.PluginType && strings.EqualFold(key, "type") {
				return true
			}
			if names(member, layers) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(v, func(item any) bool { return names(item, layers) })
	case string:
		text, err := base64.StdEncoding.DecodeString(v)
		if err != nil || len(text) == 0 || layers == most {
			return false
		}
		var inner any
		return json.Unmarshal(text, &inner) == nil && names(inner, layers+1)
	}
	return false
}
