// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// digestOf hashes by itself: package digest knows only the hashes that a program links.
func digestOf(data []byte) digest.Digest {
	sum := sha256.Sum256(data)
	return digest.NewDigestFromBytes(digest.SHA256, sum[:])
}

// blobs are the contents of an archive by their SHA-256, in hexadecimal.
type blobs map[string][]byte

func (b blobs) add(mediaType string, data []byte) v1.Descriptor {
	d := digestOf(data)
	b[d.Encoded()] = data
	return v1.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(data))}
}

func (b blobs) addJSON(mediaType string, value any) (v1.Descriptor, error) {
	data, err := json.Marshal(value)
	if err != nil {
		return v1.Descriptor{}, fmt.Errorf("encode %s: %w", mediaType, err)
	}
	return b.add(mediaType, data), nil
}

// compress makes a gzip without time or name in it.
func compress(data []byte) ([]byte, error) {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, err := w.Write(data)
	if err := errors.Join(err, w.Close()); err != nil {
		return nil, fmt.Errorf("compress layer: %w", err)
	}
	return out.Bytes(), nil
}

// tree has the type of each name that earlier layers put into the image.
type tree map[string]fs.FileMode

// layer makes a tar of the files, sorted, with the directories above them that no
// layer has.
func (t tree) layer(files []File) ([]byte, error) {
	files, err := cleaned(files)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	archive := tar.NewWriter(&out)
	for _, f := range files {
		for at, c := range f.Name {
			if c != '/' {
				continue
			}
			above := f.Name[:at]
			switch mode, known := t[above]; {
			case !known:
				t[above] = fs.ModeDir
				if err := put(archive, File{Name: above, Mode: fs.ModeDir | 0o755}); err != nil {
					return nil, err
				}
			case !mode.IsDir():
				return nil, fmt.Errorf("%s: %s is no directory", f.Name, above)
			}
		}
		t[f.Name] = f.Mode.Type()
		if err := put(archive, f); err != nil {
			return nil, err
		}
	}
	if err := archive.Close(); err != nil {
		return nil, fmt.Errorf("end layer: %w", err)
	}
	return out.Bytes(), nil
}

// cleaned returns the files sorted, with names that lie within the image.
func cleaned(files []File) ([]File, error) {
	files = slices.Clone(files)
	for i, f := range files {
		name := strings.TrimPrefix(f.Name, "/")
		if !fs.ValidPath(name) || name == "." {
			return nil, fmt.Errorf("file name %q: no clean path within the image", f.Name)
		}
		files[i].Name = name
	}
	slices.SortFunc(files, func(a, b File) int { return cmp.Compare(a.Name, b.Name) })
	for i := range files {
		if i > 0 && files[i].Name == files[i-1].Name {
			return nil, fmt.Errorf("file %s: there twice in one layer", files[i].Name)
		}
	}
	return files, nil
}

// put writes one entry without any property of the build machine.
func put(archive *tar.Writer, f File) error {
	h := &tar.Header{Name: f.Name, ModTime: time.Unix(0, 0), Mode: int64(f.Mode.Perm())}
	for bit, value := range map[fs.FileMode]int64{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if f.Mode&bit != 0 {
			h.Mode |= value
		}
	}
	switch f.Mode.Type() {
	case 0:
		h.Typeflag, h.Size = tar.TypeReg, int64(len(f.Data))
	case fs.ModeDir:
		h.Typeflag, h.Name = tar.TypeDir, path.Clean(f.Name)+"/"
	case fs.ModeSymlink:
		if f.Link == "" {
			return fmt.Errorf("file %s: a symbolic link to nothing", f.Name)
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, f.Link
	default:
		return fmt.Errorf("file %s: %s is no type that an image can have here", f.Name, f.Mode.Type())
	}
	if len(f.Data) > 0 && h.Typeflag != tar.TypeReg {
		return fmt.Errorf("file %s: has data, but is not a regular file", f.Name)
	}
	if err := archive.WriteHeader(h); err != nil {
		return fmt.Errorf("write header of %s: %w", f.Name, err)
	}
	if _, err := archive.Write(f.Data); err != nil {
		return fmt.Errorf("write %s: %w", f.Name, err)
	}
	return nil
}
